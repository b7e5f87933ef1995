//! What `lab-pod` prints, one JSON object a line.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A server is ready.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Listening {
    /// Its address, with the port that the kernel chose if it was asked to.
    pub listening: SocketAddr,
}

/// One connect, as the client's application sees it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ConnectReport {
    /// getpeername().
    pub peer: Option<SocketAddr>,
    /// getsockname().
    pub local: Option<SocketAddr>,
    /// What the server called itself.
    pub id: Option<String>,
    /// Why there is no id: the name of an errno, or `timeout` (lab-pod's own,
    /// while ETIMEDOUT is the kernel's), or `eof`.
    pub errno: Option<String>,
    /// How long connect() took.
    pub connect_us: u64,
}

/// The answer of an HTTP server.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct HttpReport {
    /// Such as 200.
    pub status: u16,
    /// Status line and headers.
    pub head: String,
    /// What follows them.
    pub body: String,
}

/// Many connects.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// Answers by server.
    pub ids: BTreeMap<String, u64>,
    /// Failures by name, as in [`ConnectReport::errno`].
    pub errnos: BTreeMap<String, u64>,
    /// The longest connect(), whether it failed or not.
    pub max_connect_us: u64,
    /// Each connect that was answered, if it was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub landings: Vec<Landing>,
}

/// Connects at a steady pace.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct PaceReport {
    /// In the order in which they were due.
    pub connects: Vec<PacedConnect>,
}

/// One of them.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct PacedConnect {
    /// When it was due, since the first.
    pub at_ms: u32,
    /// How long connect() took.
    pub took_ms: u32,
    /// What the server called itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Why there is no id, as in [`ConnectReport::errno`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
}

/// Many connects or questions to many servers: what each gave.
pub type ManyReport = BTreeMap<SocketAddr, LoadReport>;

/// When a connect was made, and who answered. Times are those of
/// `CLOCK_MONOTONIC` in ns, the same in all processes.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Landing {
    /// Before connect().
    pub start_ns: u64,
    /// After the answer.
    pub end_ns: u64,
    /// What the server called itself.
    pub id: String,
}

impl LoadReport {
    /// Counts one connect.
    pub fn add(&mut self, connect: ConnectReport) {
        let (counts, key) = match (connect.id, connect.errno) {
            (Some(id), _) => (&mut self.ids, id),
            (None, errno) => (&mut self.errnos, errno.unwrap_or_default()),
        };
        *counts.entry(key).or_default() += 1;
        self.max_connect_us = self.max_connect_us.max(connect.connect_us);
    }

    /// Adds the counts of another.
    pub fn merge(&mut self, other: Self) {
        for (id, count) in other.ids {
            *self.ids.entry(id).or_default() += count;
        }
        for (errno, count) in other.errnos {
            *self.errnos.entry(errno).or_default() += count;
        }
        self.max_connect_us = self.max_connect_us.max(other.max_connect_us);
        self.landings.extend(other.landings);
    }
}

/// One datagram sent, and the answer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct UdpReport {
    /// getpeername(), if the socket is connected.
    pub peer: Option<SocketAddr>,
    /// Source of the answer, as recvfrom() shows it.
    pub from: Option<SocketAddr>,
    /// What the server called itself.
    pub id: Option<String>,
    /// Why there is no answer, as in [`ConnectReport::errno`].
    pub errno: Option<String>,
}

/// What one command to a `session` came to.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct SessionReport {
    /// getsockname() afterwards: another port if the kernel has taken it back.
    pub local: SocketAddr,
    /// What the server called itself; empty if none was asked.
    pub id: Option<String>,
    /// Why it failed, as in [`ConnectReport::errno`].
    pub errno: Option<String>,
}

/// Result of `bench-connect`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct ConnectBench {
    /// Connections made.
    pub connects: u64,
    /// Connects that failed.
    pub errors: u64,
    /// Time it took.
    pub seconds: f64,
    /// Connections a second.
    pub per_second: f64,
}

/// Result of `bench-pingpong`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct PingPongBench {
    /// Bytes of each message.
    pub size: usize,
    /// Round trips made.
    pub count: usize,
    /// Time it took.
    pub seconds: f64,
    /// Median round trip.
    pub p50_ns: u64,
    /// Round trip that one in a hundred exceeds.
    pub p99_ns: u64,
    /// Mean round trip.
    pub mean_ns: u64,
}

/// Result of `bench-stream`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct StreamBench {
    /// Bytes that the server read after its warm-up.
    pub bytes: u64,
    /// The same a second.
    pub bytes_per_second: f64,
}

/// One end's view of a checked stream.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct StreamReport {
    /// Bytes that the kernel took.
    pub sent: u64,
    /// Bytes that came.
    pub received: u64,
    /// Bytes that were not those due at their position.
    pub wrong: u64,
    /// The first of these.
    pub first_wrong: Option<Misplaced>,
    /// The peer's half-close was seen.
    pub end_seen: bool,
    /// What ended it early: the name of an errno, or `stalled`.
    pub error: Option<String>,
    /// All bytes went both ways, each right, and nothing else.
    pub ok: bool,
}

/// A byte that is not the one due at its position.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Misplaced {
    /// Where it was received.
    pub position: u64,
    /// Where the bytes received there belong, if they are the stream's: tells
    /// reordering, loss and doubling from corruption.
    pub belongs_at: Option<u64>,
}
