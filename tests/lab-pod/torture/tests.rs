//! Tests of the checker: it finds what a faulty way between the ends does, and
//! nothing if the way is right.

mod proxy;

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use lab::pattern::Pattern;
use lab::torture::{FaultKind, TortureReport};

use super::event_loop::EventLoop;
use super::plan::{Ending, Plan, Side, Style};
use super::server::Running;
use super::session::Session;
use super::tally::Tally;
use super::{TortureArgs, client, options};
use crate::End;
use proxy::{Damage, Proxy};

const SEED: u64 = 11;
/// Longer than any rest of a plan.
const PATIENCE: Duration = Duration::from_millis(1500);

fn args() -> TortureArgs {
    TortureArgs {
        end: End {
            connect: None,
            listen: None,
        },
        banks: 1,
        threads: 1,
        patience_ms: PATIENCE,
        no_victims: true,
        victim: false,
        connections: 0,
        seconds: 60.0,
        until_stdin_closes: false,
        seed: SEED,
        parallel: 50,
        first_id: 0,
    }
}

/// A server, on a port below those that the kernel gives away.
fn server() -> (Running, u16) {
    static NEXT: AtomicU16 = AtomicU16::new(24_000);
    loop {
        let port = NEXT.fetch_add(3, Ordering::Relaxed);
        assert!(port < 32_000, "no free port");
        let address = (Ipv4Addr::LOCALHOST, port).into();
        if let Ok(running) = Running::start(&args(), address) {
            return (running, port);
        }
    }
}

/// What both ends report of a plan whose bytes are damaged on their way.
fn check(damage: Damage, id: u64, connections: u64) -> TortureReport {
    let (server, port) = server();
    let front = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
    let _proxy = Proxy::start(front, Ipv4Addr::LOCALHOST.into(), port, damage);
    let args = TortureArgs {
        connections,
        first_id: id,
        ..args()
    };
    let mut report = client::run(&args, SocketAddr::new(front, port)).unwrap();
    report.merge_other_end(server.finish().unwrap());
    report
}

/// Plans that a proxy can relay, with bytes both ways.
fn plans(count: usize) -> impl Iterator<Item = u64> {
    let fits = |id: &u64| {
        let plan = Plan::new(SEED, *id);
        plan.ending == Ending::Orderly && plan.client.send.min(plan.server.send) > 100
    };
    (0..).filter(fits).take(count)
}

fn faults(damage: Damage, kind: FaultKind) {
    for id in plans(3) {
        let report = check(damage, id, 1);
        let plan = Plan::new(SEED, id);
        assert!(report.count(kind) > 0, "{report:?}\n{plan:?}");
    }
}

#[test]
fn an_undamaged_way_gives_no_fault() {
    for id in plans(6) {
        let report = check(Damage::None, id, 1);
        assert_eq!(report.faults, Default::default(), "{report:?}");
        assert_eq!(report.connections, 1);
    }
}

#[test]
fn tcp_itself_gives_no_fault_in_any_scenario() {
    let (server, port) = server();
    let args = TortureArgs {
        connections: 400,
        patience_ms: Duration::from_secs(10),
        ..args()
    };
    let to = (Ipv4Addr::LOCALHOST, port).into();
    let mut report = client::run(&args, to).unwrap();
    report.merge_other_end(server.finish().unwrap());
    // Nobody listens on the ports of servers that are killed.
    let refused = report.events.get("no connection, the server was killed");
    assert_eq!(report.connections + refused.copied().unwrap_or(0), 400);
    assert_eq!(report.faults, Default::default(), "{:?}", report.described);
    assert!(report.scenarios.len() > 20, "{:?}", report.scenarios);
}

#[test]
fn a_flipped_bit_is_found() {
    faults(Damage::Flip, FaultKind::Wrong);
}

#[test]
fn a_swallowed_byte_is_found() {
    faults(Damage::Swallow, FaultKind::Wrong);
}

#[test]
fn two_chunks_in_the_wrong_order_are_found() {
    faults(Damage::Swap, FaultKind::Wrong);
}

#[test]
fn bytes_that_never_come_are_a_hang() {
    faults(Damage::Stall, FaultKind::Hung);
}

#[test]
fn a_reset_that_no_end_asked_for_is_an_error() {
    faults(Damage::Reset, FaultKind::Error);
}

#[test]
fn a_reader_that_is_not_woken_is_a_hang_with_bytes_unread() {
    for style in [Style::Level, Style::Edge, Style::ShortRead, Style::Count] {
        let (mut peer, stream) = pair();
        // The kernel wakes nobody before so many bytes are there.
        options::set_low_water(stream.as_fd(), 1 << 16);
        let plan = Arc::new(reading_plan());
        let session = Session::new(Arc::clone(&plan), Side::Client, Instant::now());
        let tally = Tally::default();
        let mut events = EventLoop::new(Duration::from_millis(300), tally.clone()).unwrap();
        events.add(stream, session, style);
        let mut bytes = vec![0; plan.server.send as usize];
        Pattern::new(plan.stream_seed(Side::Server), plan.server.send).fill(0, &mut bytes);
        events.turn().unwrap();
        peer.write_all(&bytes).unwrap();
        while events.open() > 0 {
            events.turn().unwrap();
        }
        let report = tally.lock();
        assert_eq!(report.count(FaultKind::Hung), 1, "{style:?}: {report:?}");
        assert_eq!(report.described[0].what, "hung with bytes unread");
    }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    (listener.accept().unwrap().0, stream)
}

/// The client only reads, without a rest.
fn reading_plan() -> Plan {
    let reads_only = |plan: &Plan| {
        plan.scenario.shape == "stream down"
            && plan.ending == Ending::Orderly
            && plan.client.stop.is_none()
            && plan.client.send == 0
            && plan.server.send < 10_000
    };
    (0..)
        .map(|id| Plan::new(SEED, id))
        .find(reads_only)
        .unwrap()
}
