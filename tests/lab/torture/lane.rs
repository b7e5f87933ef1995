//! The ways by which pods, and the node itself, reach the torture's servers.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result};

use super::TortureReport;
use crate::report::Listening;
use crate::{Node, Place, Pod, Process};

/// What `lab-pod torture` is told with `--banks`: its servers have three times as
/// many ports.
pub(super) const BANKS: u16 = 4;
const PORTS: u16 = 3 * BANKS;
/// The first port of the server that listens on IPv4 addresses.
const PORT_V4: u16 = 8000;
/// That of the one on all addresses: to it, IPv4 ones are IPv4-mapped.
const PORT_V6: u16 = 8100;

const CLUSTER_V4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const CLUSTER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x10);

/// Where a lane begins.
#[derive(Clone, Copy, Debug)]
enum From {
    /// A pod on the same node.
    Pod,
    /// The host's network.
    Host,
    /// The pod of the servers.
    Server,
}

/// Two pods of a node, and what connects them.
pub(super) struct Lanes {
    clients: Vec<[Process; 3]>,
    servers: [Process; 2],
}

/// What the clients have in common.
pub(super) struct Load {
    pub(super) seed: u64,
    /// Connections at once, of each lane.
    pub(super) parallel: usize,
    /// When a connection is hung, milliseconds.
    pub(super) patience_ms: u128,
    /// Numbers of connections are from here on.
    pub(super) first_id: u64,
}

/// So many numbers has each lane.
const IDS: u64 = 1 << 40;
/// And so many a round.
pub(super) const IDS_OF_ROUND: u64 = 8 * IDS;

/// The Services, one a family, that have all ports of both servers.
pub(super) fn write_services(node: &Node, web: &Pod) -> Result<()> {
    let v4 = service("v4", CLUSTER_V4.into(), web.ipv4().into(), PORT_V4);
    let v6 = service("v6", CLUSTER_V6.into(), web.ipv6().into(), PORT_V6);
    node.write_manifest("v4.yaml", &v4)?;
    node.write_manifest("v6.yaml", &v6)
}

impl Lanes {
    /// Starts servers and clients.
    pub(super) fn start(node: &Node, client: &Pod, web: &Pod, load: &Load) -> Result<Self> {
        let listen = |address: IpAddr, port| -> Result<Process> {
            let mut server = start(web, "--listen", SocketAddr::new(address, port), load, &[])?;
            let _ready: Listening = server.report().context("wait for a server")?;
            Ok(server)
        };
        let servers = [
            listen(Ipv4Addr::UNSPECIFIED.into(), PORT_V4)?,
            listen(Ipv6Addr::UNSPECIFIED.into(), PORT_V6)?,
        ];
        let to_v4 = [
            (From::Pod, CLUSTER_V4.into()),
            (From::Pod, web.ipv4().into()),
            (From::Server, Ipv4Addr::LOCALHOST.into()),
        ];
        let to_v6 = [
            (From::Pod, CLUSTER_V6.into()),
            (From::Pod, web.ipv6().into()),
            (From::Host, web.ipv4().into()),
        ];
        let mut ids = (0..).map(|lane| load.first_id + lane * IDS);
        let mut connect = |(from, address): (From, IpAddr), port| {
            let (to, id) = (SocketAddr::new(address, port), ids.next().unwrap_or(0));
            match from {
                From::Pod => start_client(client, to, load, id),
                From::Host => start_client(node, to, load, id),
                From::Server => start_client(web, to, load, id),
            }
        };
        let mut clients = Vec::new();
        for (lanes, port) in [(to_v4, PORT_V4), (to_v6, PORT_V6)] {
            let [first, second, third] = lanes;
            clients.push([
                connect(first, port)?,
                connect(second, port)?,
                connect(third, port)?,
            ]);
        }
        Ok(Self { clients, servers })
    }

    /// Makes no new connections, and waits until all are over.
    pub(super) fn finish(mut self) -> Result<TortureReport> {
        self.clients
            .iter_mut()
            .flatten()
            .for_each(Process::close_input);
        let mut all = TortureReport::default();
        let mut of_clients = Vec::new();
        for lanes in self.clients {
            let mut report = TortureReport::default();
            for client in lanes {
                report.merge(client.finish().context("the report of a client")?);
            }
            of_clients.push(report);
        }
        for (mut report, server) in of_clients.into_iter().zip(self.servers) {
            report.merge_other_end(server.finish().context("the report of a server")?);
            all.merge(report);
        }
        Ok(all)
    }
}

fn start_client(place: &impl Place, to: SocketAddr, load: &Load, first_id: u64) -> Result<Process> {
    let rest = [
        ("--seed", load.seed.to_string()),
        ("--parallel", load.parallel.to_string()),
        ("--first-id", first_id.to_string()),
    ];
    start(place, "--connect", to, load, &rest)
}

fn start(
    place: &impl Place,
    end: &str,
    address: SocketAddr,
    load: &Load,
    rest: &[(&str, String)],
) -> Result<Process> {
    let (address, banks) = (address.to_string(), BANKS.to_string());
    let patience = load.patience_ms.to_string();
    let mut args = vec!["torture", end, &address, "--banks", &banks];
    args.extend(["--threads", "1", "--patience-ms", &patience]);
    if end == "--connect" {
        args.push("--until-stdin-closes");
    }
    for (name, value) in rest {
        args.extend([*name, value.as_str()]);
    }
    place.start_lab_pod(&args)
}

fn service(name: &str, cluster_ip: IpAddr, endpoint: IpAddr, first_port: u16) -> String {
    let family = if cluster_ip.is_ipv4() { "IPv4" } else { "IPv6" };
    let mut ports = String::new();
    for port in first_port..first_port + PORTS {
        let _ = write!(ports, "{{name: p{port}, port: {port}, protocol: TCP}}, ");
    }
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{namespace: shop, name: {name}}}\n\
         spec: {{clusterIP: \"{cluster_ip}\", clusterIPs: [\"{cluster_ip}\"], ports: [{ports}]}}\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{namespace: shop, name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}\n\
         addressType: {family}\nports: [{ports}]\n\
         endpoints: [{{addresses: [\"{endpoint}\"], nodeName: n1}}]\n"
    )
}
