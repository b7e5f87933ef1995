//! A stand-in for kube-proxy's iptables mode: the same chains and matches, so
//! that the kernel does the same work for each connection and packet.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};

use crate::network::feed;
use crate::node::Node;
use crate::place::Place;

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRule {
    /// ClusterIP.
    pub vip: IpAddr,
    /// Port at the ClusterIP.
    pub port: u16,
    /// Transport.
    pub protocol: Protocol,
    /// Where it goes, in equal parts; nowhere means refused. All must be of
    /// the family of `vip`.
    pub endpoints: Vec<SocketAddr>,
}

/// Transport protocol of a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl ServiceRule {
    /// A TCP port.
    pub fn tcp(vip: IpAddr, port: u16, endpoints: &[SocketAddr]) -> Self {
        Self {
            vip,
            port,
            protocol: Protocol::Tcp,
            endpoints: endpoints.to_vec(),
        }
    }

    /// A UDP port.
    pub fn udp(vip: IpAddr, port: u16, endpoints: &[SocketAddr]) -> Self {
        Self {
            vip,
            port,
            protocol: Protocol::Udp,
            endpoints: endpoints.to_vec(),
        }
    }
}

impl Node {
    /// Replaces the node's Service rules by these, for each family at once.
    pub fn kube_proxy(&self, services: &[ServiceRule]) -> Result<()> {
        let (v4, v6): (Vec<_>, Vec<_>) = services.iter().partition(|rule| rule.vip.is_ipv4());
        for (program, rules) in [("iptables-restore", v4), ("ip6tables-restore", v6)] {
            feed(self.command(program), &tables(&rules))
                .with_context(|| format!("write {} Service rules", rules.len()))?;
        }
        Ok(())
    }
}

/// Input of iptables-restore. Without --noflush it replaces whole tables.
fn tables(services: &[&ServiceRule]) -> String {
    let mut nat = Nat::default();
    let mut reject = String::new();
    for (number, service) in services.iter().enumerate() {
        if service.endpoints.is_empty() {
            add_reject(&mut reject, service);
        } else {
            nat.add(number, service);
        }
    }
    format!(
        "*filter\n\
         :KUBE-SERVICES - [0:0]\n\
         -A INPUT -m conntrack --ctstate NEW -j KUBE-SERVICES\n\
         -A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES\n\
         -A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES\n\
         {reject}\
         COMMIT\n\
         *nat\n\
         :KUBE-SERVICES - [0:0]\n\
         :KUBE-MARK-MASQ - [0:0]\n\
         :KUBE-POSTROUTING - [0:0]\n\
         {chains}\
         -A PREROUTING -j KUBE-SERVICES\n\
         -A OUTPUT -j KUBE-SERVICES\n\
         -A POSTROUTING -j KUBE-POSTROUTING\n\
         -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n\
         -A KUBE-POSTROUTING -j MASQUERADE --random-fully\n\
         {rules}\
         COMMIT\n",
        chains = nat.chains,
        rules = nat.rules,
    )
}

#[derive(Default)]
struct Nat {
    chains: String,
    rules: String,
}

impl Nat {
    fn add(&mut self, number: usize, service: &ServiceRule) {
        let Self { chains, rules } = self;
        put(chains, format_args!(":KUBE-SVC-{number} - [0:0]"));
        put(
            rules,
            format_args!("-A KUBE-SERVICES {} -j KUBE-SVC-{number}", matches(service)),
        );
        let count = service.endpoints.len();
        for (index, endpoint) in service.endpoints.iter().enumerate() {
            let separate = format!("KUBE-SEP-{number}-{index}");
            put(chains, format_args!(":{separate} - [0:0]"));
            put(
                rules,
                format_args!("-A KUBE-SVC-{number}{} -j {separate}", share(count - index)),
            );
            // A pod that reaches itself would see its own address as the client.
            put(
                rules,
                format_args!("-A {separate} -s {} -j KUBE-MARK-MASQ", endpoint.ip()),
            );
            let protocol = service.protocol.name();
            put(
                rules,
                format_args!(
                    "-A {separate} -p {protocol} -m {protocol} -j DNAT --to-destination {endpoint}"
                ),
            );
        }
    }
}

/// Of those that come by: one in `left`, so that every endpoint gets as many.
fn share(left: usize) -> String {
    if left == 1 {
        return String::new();
    }
    format!(
        " -m statistic --mode random --probability {:.10}",
        1.0 / left as f64
    )
}

fn add_reject(rules: &mut String, service: &ServiceRule) {
    put(
        rules,
        format_args!("-A KUBE-SERVICES {} -j REJECT", matches(service)),
    );
}

fn matches(service: &ServiceRule) -> String {
    let ServiceRule {
        vip,
        port,
        protocol,
        ..
    } = service;
    let protocol = protocol.name();
    format!("-d {vip} -p {protocol} -m {protocol} --dport {port}")
}

fn put(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("writing to a String cannot fail");
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_share_equally_in_order() {
        let endpoints = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"].map(|e| e.parse().unwrap());
        let rule = ServiceRule::tcp("10.96.0.1".parse().unwrap(), 80, &endpoints);
        let text = tables(&[&rule]);
        let jumps: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("-A KUBE-SVC-0"))
            .collect();
        assert_eq!(
            jumps,
            [
                "-A KUBE-SVC-0 -m statistic --mode random --probability 0.3333333333 -j KUBE-SEP-0-0",
                "-A KUBE-SVC-0 -m statistic --mode random --probability 0.5000000000 -j KUBE-SEP-0-1",
                "-A KUBE-SVC-0 -j KUBE-SEP-0-2",
            ]
        );
    }

    #[test]
    fn no_endpoint_means_refused() {
        let rule = ServiceRule::udp("fd00:10:96::1".parse().unwrap(), 53, &[]);
        let text = tables(&[&rule]);
        assert!(
            text.contains("-A KUBE-SERVICES -d fd00:10:96::1 -p udp -m udp --dport 53 -j REJECT")
        );
        assert!(!text.contains("KUBE-SVC"));
    }
}
