//! When an end takes its socket for readable or writable: what sets the styles
//! of readers apart. Those that are edge-triggered remember it between events,
//! and forget it where the programs that they stand for do.

use nix::sys::epoll::EpollFlags;

use super::plan::Style;

/// What an edge-triggered end listens for, once and for all.
pub(super) const EDGES: EpollFlags = EpollFlags::EPOLLIN
    .union(EpollFlags::EPOLLOUT)
    .union(EpollFlags::EPOLLRDHUP)
    .union(EpollFlags::EPOLLET);

const READ: EpollFlags = EpollFlags::EPOLLIN
    .union(EpollFlags::EPOLLRDHUP)
    .union(BROKEN);
const WRITE: EpollFlags = EpollFlags::EPOLLOUT.union(BROKEN);
const CLOSING: EpollFlags = EpollFlags::EPOLLRDHUP.union(BROKEN);
const BROKEN: EpollFlags = EpollFlags::EPOLLHUP.union(EpollFlags::EPOLLERR);

pub(super) struct Readiness {
    style: Style,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer has closed: whoever knows that reads to the end.
    closing: bool,
}

/// What a read came to.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReadOutcome {
    Count(usize),
    WouldBlock,
}

impl Readiness {
    pub(super) fn new(style: Style) -> Self {
        Self {
            style,
            readable: false,
            writable: true,
            closing: false,
        }
    }

    pub(super) fn note(&mut self, events: EpollFlags) {
        self.readable |= events.intersects(READ);
        self.writable |= events.intersects(WRITE);
        self.closing |= events.intersects(CLOSING);
    }

    /// After a read for `asked` bytes; `unread` is FIONREAD.
    pub(super) fn after_read(
        &mut self,
        asked: usize,
        outcome: ReadOutcome,
        unread: impl FnOnce() -> i32,
    ) {
        let drained = match (outcome, self.style) {
            (ReadOutcome::WouldBlock, _) => true,
            (_, Style::Level) => true,
            (_, Style::Edge) => false,
            (ReadOutcome::Count(count), Style::ShortRead) => !self.closing && count < asked,
            (ReadOutcome::Count(count), Style::Count) => {
                !self.closing && (count < asked || unread() <= 0)
            }
            (_, Style::Tokio | Style::Blocking) => unreachable!("these have no event loop"),
        };
        self.readable &= !drained;
    }

    /// After a write for `asked` bytes.
    pub(super) fn after_write(&mut self, asked: usize, count: Option<usize>) {
        let full = match self.style {
            Style::Level | Style::Edge => count.is_none(),
            _ => count.is_none_or(|count| count < asked),
        };
        self.writable &= !full;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the reader goes on after it asked for 10 bytes.
    fn goes_on(style: Style, outcome: ReadOutcome, unread: i32) -> bool {
        let mut readiness = Readiness::new(style);
        readiness.note(EpollFlags::EPOLLIN);
        readiness.after_read(10, outcome, || unread);
        readiness.readable
    }

    #[test]
    fn styles_differ_in_what_they_take_for_drained() {
        use ReadOutcome::{Count, WouldBlock};
        let all = [Style::Level, Style::Edge, Style::ShortRead, Style::Count];
        let table = |outcome, unread| all.map(|style| goes_on(style, outcome, unread));
        assert_eq!(table(Count(10), 5), [false, true, true, true]);
        assert_eq!(table(Count(10), 0), [false, true, true, false]);
        assert_eq!(table(Count(9), 5), [false, true, false, false]);
        assert_eq!(table(WouldBlock, 5), [false; 4]);
    }

    #[test]
    fn who_knows_that_the_peer_closed_reads_to_the_end() {
        for style in [Style::ShortRead, Style::Count] {
            let mut readiness = Readiness::new(style);
            readiness.note(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
            readiness.after_read(10, ReadOutcome::Count(3), || 0);
            assert!(readiness.readable);
        }
    }
}
