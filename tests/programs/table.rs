//! The programs, one row each.

use anyhow::Result;
use lab::programs::Nginx;

use crate::stage::{BACK, FRONT, Running, SECONDS, Stage};

/// What becomes of the connections to a server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expected {
    /// They are spliced.
    Spliced,
    /// None ever is, for this reason.
    Left(&'static str),
    /// It is left to chance: say what it was.
    Either,
}

/// One of them.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    /// Of the front, and of what is behind it, if something is.
    pub(crate) hops: &'static [Expected],
    /// Words that a client prints when something is wrong, if it does not fail.
    pub(crate) complaints: &'static [&'static str],
    pub(crate) start: fn(&Stage) -> Result<Running<'_>>,
}

use Expected::{Either, Left, Spliced};

const fn program(
    name: &'static str,
    hops: &'static [Expected],
    start: fn(&Stage) -> Result<Running<'_>>,
) -> Program {
    Program {
        name,
        hops,
        complaints: &[],
        start,
    }
}

/// The table.
pub(crate) fn programs() -> Vec<Program> {
    [redis(), web_servers(), proxies(), others()]
        .into_iter()
        .flatten()
        .collect()
}

fn redis() -> Vec<Program> {
    vec![
        Program {
            complaints: &["ERR", "Error"],
            ..program("redis-benchmark, Redis", &[Spliced], |stage| {
                let server = stage.programs.redis(&stage.front, stage.front_port())?;
                let (host, port) = FRONT.split_once(':').unwrap_or_default();
                Ok(Running {
                    servers: vec![server],
                    client: Box::new(move || {
                        let tests = ["-t", "set,get,lpush,lrange_100", "-n", "20000", "-d", "512"];
                        let args = [&["-h", host, "-p", port, "-c", "50", "-q"], &tests[..]];
                        Ok(stage.client("redis-benchmark", &args.concat()))
                    }),
                })
            })
        },
        program("publish and subscribe, Redis", &[Spliced], |stage| {
            let server = stage.programs.redis(&stage.front, stage.front_port())?;
            go_client(stage, vec![server], "publish", &[])
        }),
        program("redis-cli, Redis", &[Left("blocking")], |stage| {
            let server = stage.programs.redis(&stage.front, stage.front_port())?;
            let (host, port) = FRONT.split_once(':').unwrap_or_default();
            Ok(Running {
                servers: vec![server],
                client: Box::new(move || {
                    let script = "\
                        redis-cli -h $0 -p $1 SUBSCRIBE news > $2 & \
                        until [ \"$(redis-cli -h $0 -p $1 PUBLISH news start)\" = 1 ]; do \
                          sleep 0.1; done; \
                        seq -f 'PUBLISH news news-%g' 2000 | redis-cli -h $0 -p $1 > /dev/null; \
                        redis-cli -h $0 -p $1 PUBLISH news end > /dev/null; \
                        until grep -qx end $2; do sleep 0.1; done; kill $!; \
                        seq -f news-%g 2000 > $2.sent; grep ^news- $2 | cmp - $2.sent";
                    let log = stage.programs.bodies().join("news");
                    let mut command = stage.client("sh", &["-c", script, host, port]);
                    command.arg(log);
                    Ok(command)
                }),
            })
        }),
    ]
}

fn web_servers() -> Vec<Program> {
    vec![
        program("curl, nginx", &[Spliced], |stage| {
            let server = stage
                .programs
                .nginx(&stage.front, stage.front_port(), Nginx::Static)?;
            Ok(Running {
                servers: vec![server],
                client: Box::new(move || {
                    // One connection for all.
                    let script = "\
                        for n in $(seq 100); do for b in $1/body-*; do \
                          echo \"url = http://$0/${b##*/}\"; echo 'output = /dev/stdout'; \
                        done; done | curl --silent --show-error --fail --config - | sha256sum > $2.got; \
                        for n in $(seq 100); do cat $1/body-*; done | sha256sum | cmp - $2.got";
                    let mut command = stage.client("sh", &["-c", script, FRONT]);
                    command.arg(stage.programs.bodies());
                    command.arg(stage.programs.bodies().join("sum"));
                    Ok(command)
                }),
            })
        }),
        Program {
            complaints: &["Socket errors", "Non-2xx"],
            ..program("wrk, nginx", &[Spliced], |stage| {
                let server =
                    stage
                        .programs
                        .nginx(&stage.front, stage.front_port(), Nginx::Static)?;
                Ok(Running {
                    servers: vec![server],
                    client: Box::new(move || {
                        let url = format!("http://{FRONT}/body-4096");
                        let args = ["-t", "1", "-c", "16", "-d", &format!("{SECONDS}s"), &url];
                        Ok(stage.client("wrk", &args))
                    }),
                })
            })
        },
        program("Go HTTP/1, Go", &[Spliced], |stage| {
            let server = stage.programs.go_http(&stage.front, stage.front_port())?;
            go_client(stage, vec![server], "ask-http", &["-echo"])
        }),
        program("Go HTTP/2, Go", &[Spliced], |stage| {
            let server = stage.programs.go_http(&stage.front, stage.front_port())?;
            go_client(stage, vec![server], "ask-http", &["-echo", "-http2"])
        }),
        program("Node, Node", &[Spliced], |stage| {
            let server = stage.programs.node(&stage.front, stage.front_port())?;
            Ok(Running {
                servers: vec![server],
                client: Box::new(|| stage.programs.node_client(&stage.client, FRONT, SECONDS)),
            })
        }),
        // The server switches its sockets to blocking mode for each request.
        program("java.net.http, JDK's server", &[Either], |stage| {
            let server = stage.programs.java(&stage.front, stage.front_port())?;
            java_client(stage, vec![server])
        }),
        program("java.net.http, Go", &[Spliced], |stage| {
            let server = stage.programs.go_http(&stage.front, stage.front_port())?;
            java_client(stage, vec![server])
        }),
        program("Go HTTP/1, JDK's server", &[Either], |stage| {
            let server = stage.programs.java(&stage.front, stage.front_port())?;
            go_client(stage, vec![server], "ask-http", &["-echo"])
        }),
        program("requests, gunicorn", &[Left("blocking")], |stage| {
            let server = stage.programs.gunicorn(&stage.front, stage.front_port())?;
            Ok(Running {
                servers: vec![server],
                client: Box::new(|| Ok(stage.programs.requests(&stage.client, FRONT, SECONDS))),
            })
        }),
        program("gRPC in Go", &[Spliced], |stage| {
            let server = stage.programs.grpc(&stage.front, stage.front_port())?;
            go_client(stage, vec![server], "ask-grpc", &[])
        }),
    ]
}

fn proxies() -> Vec<Program> {
    vec![
        program("Go, nginx, Go", &[Spliced, Spliced], |stage| {
            let back = stage.programs.go_http(&stage.back, stage.back_port())?;
            let role = Nginx::Proxy(BACK);
            let front = stage
                .programs
                .nginx(&stage.front, stage.front_port(), role)?;
            go_client(stage, vec![back, front], "ask-http", &["-echo"])
        }),
        program("WebSockets, nginx", &[Spliced, Spliced], |stage| {
            let back = stage.programs.web_socket(&stage.back, stage.back_port())?;
            let role = Nginx::Proxy(BACK);
            let front = stage
                .programs
                .nginx(&stage.front, stage.front_port(), role)?;
            Ok(Running {
                servers: vec![back, front],
                client: Box::new(|| {
                    Ok(stage
                        .programs
                        .web_socket_client(&stage.client, FRONT, SECONDS))
                }),
            })
        }),
        program("Go, HAProxy, nginx", &[Spliced, Spliced], |stage| {
            let role = Nginx::Static;
            let back = stage.programs.nginx(&stage.back, stage.back_port(), role)?;
            let port = stage.front_port();
            let front = stage
                .programs
                .haproxy(&stage.front, port, BACK, "http", "")?;
            go_client(stage, vec![back, front], "ask-http", &[])
        }),
        program(
            "Go, HAProxy over TCP, Redis",
            &[Spliced, Spliced],
            |stage| {
                let back = stage.programs.redis(&stage.back, stage.back_port())?;
                let port = stage.front_port();
                let front = stage
                    .programs
                    .haproxy(&stage.front, port, BACK, "tcp", "")?;
                go_client(stage, vec![back, front], "publish", &[])
            },
        ),
    ]
}

fn others() -> Vec<Program> {
    vec![
        program("Go, memcached", &[Spliced], |stage| {
            let server = stage.programs.memcached(&stage.front, stage.front_port())?;
            go_client(stage, vec![server], "ask-memcached", &[])
        }),
        Program {
            complaints: &["aborted", "error:"],
            ..program("pgbench, PostgreSQL", &[Spliced], |stage| {
                let server = stage.programs.postgres(&stage.front, stage.front_port())?;
                Ok(Running {
                    servers: vec![server],
                    client: Box::new(move || {
                        let mut command = stage.programs.pgbench(&stage.client, FRONT)?;
                        command.args(["-c", "4", "-T", &SECONDS.to_string(), "postgres"]);
                        Ok(command)
                    }),
                })
            })
        },
        program("iperf3", &[Either], |stage| iperf(stage, &[])),
        program("iperf3, to the client", &[Either], |stage| {
            iperf(stage, &["--reverse"])
        }),
    ]
}

fn iperf<'a>(stage: &'a Stage, options: &'static [&'static str]) -> Result<Running<'a>> {
    let server = stage.programs.iperf(&stage.front, stage.front_port())?;
    let (host, port) = FRONT.split_once(':').unwrap_or_default();
    Ok(Running {
        servers: vec![server],
        client: Box::new(move || {
            let seconds = SECONDS.to_string();
            let args = [&["-c", host, "-p", port, "-t", &seconds], options].concat();
            Ok(stage.client("iperf3", &args))
        }),
    })
}

fn java_client(stage: &Stage, servers: Vec<lab::programs::Running>) -> Result<Running<'_>> {
    Ok(Running {
        servers,
        client: Box::new(|| Ok(stage.programs.java_client(&stage.client, FRONT, SECONDS))),
    })
}

/// A client in Go that asks the front.
fn go_client<'a>(
    stage: &'a Stage,
    servers: Vec<lab::programs::Running>,
    name: &'static str,
    args: &'static [&'static str],
) -> Result<Running<'a>> {
    Ok(Running {
        servers,
        client: Box::new(move || {
            let mut command = stage
                .programs
                .go_client(&stage.client, name, FRONT, SECONDS);
            command.args(args);
            Ok(command)
        }),
    })
}
