//! The programs, one case each.

use std::process::Command;

use anyhow::{Context as _, Result};
use lab::programs::{Nginx, Programs, Running};
use lab::{Place as _, Pod};

/// Of each measurement.
const SECONDS: u32 = 1;
/// What web servers serve, memcached keeps and gRPC carries.
const BODY: &str = "body-4096";

/// Where the programs of one way are.
pub(super) struct Ends<'a> {
    pub(super) client: &'a Pod,
    pub(super) front: &'a Pod,
    /// What the front asks, if it is a proxy.
    pub(super) back: &'a Pod,
    pub(super) front_port: u16,
    pub(super) back_port: u16,
    /// What the client connects to.
    pub(super) to_front: String,
    /// What the front connects to.
    pub(super) to_back: String,
}

/// One of them.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) serve: fn(&Programs, &Ends<'_>) -> Result<Vec<Running>>,
    pub(super) ask: fn(&Programs, &Ends<'_>) -> Result<Command>,
    /// In what the client prints.
    pub(super) requests_per_second: fn(&str) -> Option<f64>,
}

pub(super) const CASES: &[Case] = &[
    Case {
        name: "redis c50",
        serve: |programs, ends| Ok(vec![programs.redis(ends.front, ends.front_port)?]),
        ask: redis_benchmark,
        requests_per_second: of_redis_benchmark,
    },
    web("nginx c16", |programs, ends| {
        Ok(vec![programs.nginx(
            ends.front,
            ends.front_port,
            Nginx::Static,
        )?])
    }),
    web("nginx proxy c16", |programs, ends| {
        let proxy = Nginx::Proxy(&ends.to_back);
        Ok(vec![
            programs.nginx(ends.back, ends.back_port, Nginx::Static)?,
            programs.nginx(ends.front, ends.front_port, proxy)?,
        ])
    }),
    web("haproxy c16", |programs, ends| {
        Ok(vec![
            programs.nginx(ends.back, ends.back_port, Nginx::Static)?,
            programs.haproxy(ends.front, ends.front_port, &ends.to_back, "http", "")?,
        ])
    }),
    web("go c16", |programs, ends| {
        Ok(vec![programs.go_http(ends.front, ends.front_port)?])
    }),
    web("node c16", |programs, ends| {
        Ok(vec![programs.node(ends.front, ends.front_port)?])
    }),
    web("jdk c16", |programs, ends| {
        Ok(vec![programs.java(ends.front, ends.front_port)?])
    }),
    Case {
        name: "memcached c16",
        serve: |programs, ends| Ok(vec![programs.memcached(ends.front, ends.front_port)?]),
        ask: |programs, ends| Ok(go(programs, ends, "ask-memcached")),
        requests_per_second: of_count,
    },
    Case {
        name: "grpc c16",
        serve: |programs, ends| Ok(vec![programs.grpc(ends.front, ends.front_port)?]),
        ask: |programs, ends| Ok(go(programs, ends, "ask-grpc")),
        requests_per_second: of_count,
    },
    Case {
        name: "pgbench c8",
        serve: |programs, ends| Ok(vec![programs.postgres(ends.front, ends.front_port)?]),
        ask: pgbench,
        requests_per_second: of_pgbench,
    },
];

/// 16 connections that ask for 4 KiB.
const fn web(name: &'static str, serve: fn(&Programs, &Ends<'_>) -> Result<Vec<Running>>) -> Case {
    Case {
        name,
        serve,
        ask: wrk,
        requests_per_second: of_wrk,
    }
}

fn wrk(_: &Programs, ends: &Ends<'_>) -> Result<Command> {
    let mut command = ends.client.command("wrk");
    command.args(["-t", "1", "-c", "16", "-d", &format!("{SECONDS}s")]);
    command.arg(format!("http://{}/{BODY}", ends.to_front));
    Ok(command)
}

/// Nothing, if a request has failed.
fn of_wrk(printed: &str) -> Option<f64> {
    let has_failed = printed.contains("Socket errors") || printed.contains("Non-2xx");
    if has_failed {
        return None;
    }
    number_after(printed, "Requests/sec:")
}

fn redis_benchmark(_: &Programs, ends: &Ends<'_>) -> Result<Command> {
    let (host, port) = ends.to_front.rsplit_once(':').context("a port")?;
    let mut command = ends.client.command("redis-benchmark");
    command.args(["-h", host, "-p", port, "-c", "50", "-n", "60000"]);
    command.args(["-t", "get", "--csv"]);
    Ok(command)
}

/// `"GET","81234.56",…` below a line with the names of the columns.
fn of_redis_benchmark(printed: &str) -> Option<f64> {
    number_after(printed, "\"GET\",\"")
}

fn go(programs: &Programs, ends: &Ends<'_>, name: &str) -> Command {
    let mut command = programs.go_client(ends.client, name, &ends.to_front, SECONDS);
    command.args(["-workers", "16", "-body", BODY]);
    command
}

/// The number of answers.
fn of_count(printed: &str) -> Option<f64> {
    Some(printed.trim().parse::<f64>().ok()? / f64::from(SECONDS))
}

/// Only reads: PostgreSQL would wait for itself otherwise.
fn pgbench(programs: &Programs, ends: &Ends<'_>) -> Result<Command> {
    let mut command = programs.pgbench(ends.client, &ends.to_front)?;
    command.args([
        "-S",
        "-n",
        "-c",
        "8",
        "-T",
        &SECONDS.to_string(),
        "postgres",
    ]);
    Ok(command)
}

fn of_pgbench(printed: &str) -> Option<f64> {
    number_after(printed, "tps =")
}

fn number_after(text: &str, words: &str) -> Option<f64> {
    let (_, rest) = text.split_once(words)?;
    let rest = rest.trim_start();
    let end = rest.find(|it: char| !it.is_ascii_digit() && it != '.');
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_each_client_are_found() {
        assert_eq!(of_wrk("  x\nRequests/sec:  12345.67\n"), Some(12345.67));
        assert_eq!(of_wrk("Non-2xx: 3\nRequests/sec:  1.0\n"), None);
        let csv = "\"test\",\"rps\"\n\"GET\",\"81234.50\",\"0.3\"\n";
        assert_eq!(of_redis_benchmark(csv), Some(81234.5));
        assert_eq!(of_pgbench("tps = 4321.5 (without"), Some(4321.5));
        assert_eq!(of_count("77\n"), Some(77.0));
    }
}
