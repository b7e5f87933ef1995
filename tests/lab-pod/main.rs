//! Helper of the lab: the servers, clients, loads and checks that run inside
//! pods, and the lab's reaper. Reports are JSON, one object a line; see
//! `lab::report`. A report of failed connects is a success of this program.

mod bench;
mod bench_serve;
mod channel;
mod connect;
mod http;
mod many;
mod node;
mod own;
mod pace;
mod pause;
mod polled;
mod serve;
mod session;
mod socket;
mod stream;
mod torture;
mod udp;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use channel::Target;
use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
#[command(about, version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Accept TCP connections, say who answers, then echo.
    Serve(ServeArgs),
    /// Connect and report who answered.
    Connect(ConnectArgs),
    /// Connect from many threads at once and count who answered.
    Load(LoadArgs),
    /// Connect at a steady pace and report each connect.
    Pace(PaceArgs),
    /// Ask many servers in turn, until standard input ends.
    LoadMany(LoadManyArgs),
    /// Send datagrams and report who answered.
    Udp(UdpArgs),
    /// Open one socket and use it as standard input says.
    Session(SessionArgs),
    /// Keep a connection in non-blocking mode and use it as standard input says.
    Polled { to: SocketAddr },
    /// Ask an HTTP server and report its answer.
    Get(GetArgs),
    /// Measure connections a second.
    BenchConnect(BenchArgs),
    /// Measure echo round trips.
    BenchPingpong(PingPongArgs),
    /// Measure a stream of messages, one way.
    BenchStream(BenchStreamArgs),
    /// The other end of both.
    BenchServe(BenchServeArgs),
    /// Send and check a stream of bytes, both ways at once.
    Stream(StreamArgs),
    /// Check many connections at once, which do all that programs do.
    Torture(torture::TortureArgs),
    /// Hold the namespaces of a pod of a real cluster.
    Pause,
    /// Hold the file systems of a node of a real cluster.
    Node(node::NodeArgs),
    /// Wait for the end of standard input, then remove a lab.
    Reap { lab: String },
    /// Remove what is left of labs whose owner is dead, and list it.
    Sweep,
    /// Make a lab of two nodes and a pod, report it, and wait for the end of
    /// standard input: for tests that kill a lab's owner.
    OwnLab { label: String },
}

#[derive(Args)]
struct ServeArgs {
    #[arg(long)]
    listen: SocketAddr,
    /// What to answer each connection with.
    #[arg(long, default_value = "")]
    id: String,
    /// Answer the address that was connected to instead.
    #[arg(long, conflicts_with = "id")]
    id_is_address: bool,
    /// Close each connection at once: the other end of bench-connect.
    #[arg(long)]
    close: bool,
    /// Answer the id to each datagram instead.
    #[arg(long, conflicts_with = "close")]
    udp: bool,
    /// Processor to stay on.
    #[arg(long)]
    cpu: Option<usize>,
}

#[derive(Args)]
struct ConnectArgs {
    to: SocketAddr,
    /// Connect so many times, one after the other, and report counts.
    #[arg(long)]
    count: Option<u64>,
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    timeout_ms: Duration,
}

#[derive(Args)]
struct LoadArgs {
    to: SocketAddr,
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Connections of all threads together.
    #[arg(long, required_unless_present = "until_stdin_closes")]
    count: Option<u64>,
    /// Go on until standard input ends, but connect once from each thread.
    #[arg(long)]
    until_stdin_closes: bool,
    /// Report each connect with its time.
    #[arg(long)]
    trace: bool,
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    timeout_ms: Duration,
}

#[derive(Args)]
struct PaceArgs {
    to: SocketAddr,
    /// Connects a second.
    #[arg(long, default_value_t = 200)]
    rate: u32,
    #[arg(long)]
    seconds: u32,
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    timeout_ms: Duration,
}

#[derive(Args)]
struct LoadManyArgs {
    /// A file with an address on each line.
    targets: PathBuf,
    /// With datagrams, half of them from connected sockets, each asked at most
    /// twice, as resolvers do.
    #[arg(long)]
    udp: bool,
    /// Rest after each.
    #[arg(long, default_value_t = 1)]
    pause_ms: u64,
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    timeout_ms: Duration,
}

#[derive(Args)]
struct UdpArgs {
    to: SocketAddr,
    /// connect() the socket first, instead of naming the target each time.
    #[arg(long)]
    connected: bool,
    /// Datagrams to send from the one socket, each with its own report.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Rest after each.
    #[arg(long, default_value_t = 0)]
    pause_ms: u64,
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    timeout_ms: Duration,
}

#[derive(Args)]
struct SessionArgs {
    kind: SessionKind,
    to: SocketAddr,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SessionKind {
    Tcp,
    /// Unconnected: each datagram names its target.
    Udp,
    ConnectedUdp,
}

#[derive(Args)]
struct GetArgs {
    to: SocketAddr,
    path: String,
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    timeout_ms: Duration,
}

#[derive(Args)]
struct BenchArgs {
    to: SocketAddr,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Args)]
struct RunArgs {
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Processor to stay on.
    #[arg(long)]
    cpu: Option<usize>,
}

impl RunArgs {
    fn duration(&self) -> Result<Duration> {
        Duration::try_from_secs_f64(self.seconds).context("--seconds")
    }
}

#[derive(Args)]
struct PingPongArgs {
    /// An address and port, or the path of a Unix socket.
    to: Target,
    #[command(flatten)]
    run: RunArgs,
    /// Bytes of each message.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    size: u32,
}

#[derive(Args)]
struct BenchStreamArgs {
    /// An address and port, or the path of a Unix socket.
    to: Target,
    /// Processor to stay on.
    #[arg(long)]
    cpu: Option<usize>,
    /// Bytes of each message.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    size: u32,
    /// Send small messages at once.
    #[arg(long)]
    nodelay: bool,
}

#[derive(Args)]
struct BenchServeArgs {
    /// An address and port, or the path of a Unix socket.
    #[arg(long)]
    listen: Target,
    /// Read, for bench-stream, rather than echo.
    #[arg(long)]
    sink: bool,
    /// Processor to stay on.
    #[arg(long)]
    cpu: Option<usize>,
}

#[derive(Args)]
struct StreamArgs {
    #[command(flatten)]
    end: End,
    /// Bytes each way.
    #[arg(long)]
    bytes: u64,
    /// Must be the same at both ends.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Stop reading now and then, so that buffers fill up.
    #[arg(long)]
    slow_reader: bool,
    /// Give up when neither direction moves for so long.
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    stall_ms: Duration,
}

#[derive(Args, Clone)]
#[group(required = true, multiple = false)]
struct End {
    #[arg(long)]
    connect: Option<SocketAddr>,
    #[arg(long)]
    listen: Option<SocketAddr>,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Serve(args) if args.udp => udp::serve(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Connect(args) => connect::run(&args),
        Command::Load(args) => connect::load(&args),
        Command::Pace(args) => pace::run(&args),
        Command::LoadMany(args) => many::run(&args),
        Command::Udp(args) => udp::ask(&args),
        Command::Session(args) => session::run(&args),
        Command::Polled { to } => polled::run(to),
        Command::Get(args) => http::get(&args),
        Command::BenchConnect(args) => bench::connect(&args),
        Command::BenchPingpong(args) => bench::ping_pong(&args),
        Command::BenchStream(args) => bench::stream(&args),
        Command::BenchServe(args) => bench_serve::run(&args),
        Command::Stream(args) => stream::run(&args),
        Command::Torture(args) => torture::run(&args),
        Command::Pause => pause::run(),
        Command::Node(args) => node::run(&args),
        Command::Reap { lab } => lab::cleanup::reap(&lab),
        Command::Sweep => socket::print(&lab::sweep()?),
        Command::OwnLab { label } => own::run(&label),
    }
}

fn milliseconds(text: &str) -> Result<Duration, std::num::ParseIntError> {
    text.parse().map(Duration::from_millis)
}
