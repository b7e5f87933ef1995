//! Clients that are left alone: pods that opted out, pods of a mesh, and host
//! processes if so asked.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use lab::fixture::{Service, dump, json, start, wait_until};
use lab::report::ConnectReport;
use lab::{Agent, Lab, Node, Place, Pod, Server};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";

/// A node with a server of shop/cart. There is no kube-proxy: what shunt leaves
/// alone gets no answer.
struct Stage {
    node: Node,
    _server: Server,
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let node = lab.node("n1").unwrap();
        let server = node.pod("server", None).unwrap();
        let running = server.serve("0.0.0.0:8080", "one").unwrap();
        let service = Service {
            endpoints: vec![(server.ipv4().into(), "n1")],
            ..Service::default()
        };
        node.write_manifest("cart.yaml", &service.yaml()).unwrap();
        Self {
            node,
            _server: running,
        }
    }

    /// The Pod object of a pod, as the kubelet's API server would hold it.
    fn write_pod(&self, pod: &Pod, metadata: &str, spec: &str) {
        let namespace = if metadata.contains("namespace:") {
            ""
        } else {
            "namespace: shop, "
        };
        let name = pod.name();
        let yaml = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{{namespace}name: {name}, uid: {}, {metadata}}}\n\
             spec: {{nodeName: n1, {spec}}}\n",
            pod.uid()
        );
        self.node
            .write_manifest(&format!("{name}.yaml"), &yaml)
            .unwrap();
    }

    /// Name and reason of each pod that is left alone.
    fn left_alone(&self) -> Vec<String> {
        let status = json(&self.node, &["status"]);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let pods = status["clients"]["left_alone"].as_array().unwrap().iter();
        let mut pods: Vec<_> = pods
            .map(|it| format!("{} {}", text(&it["pod"]), text(&it["reason"])))
            .collect();
        pods.sort_unstable();
        pods
    }

    fn count(&self, counter: &str) -> u64 {
        json(&self.node, &["status"])["counters"][counter]
            .as_u64()
            .unwrap()
    }

    fn restart(&self, agent: Agent, args: &[&str]) -> Agent {
        agent.kill().unwrap();
        start(&self.node, args)
    }
}

fn assert_translated(place: &impl Place) {
    let report = place.connect(CART).unwrap();
    assert_eq!(report.id.as_deref(), Some("one"), "{report:?}");
}

fn assert_left_alone(stage: &Stage, place: &impl Place, counter: &str) {
    let before = stage.count(counter);
    let report: ConnectReport = place
        .lab_pod(&["connect", CART, "--timeout-ms", "300"])
        .unwrap();
    assert_eq!(report.errno.as_deref(), Some("timeout"), "{report:?}");
    assert_eq!(stage.count(counter), before + 1);
}

#[test]
fn pods_that_opted_out_and_pods_of_a_mesh_are_left_alone_and_no_others() {
    let mut lab = Lab::new("optout").unwrap();
    let stage = Stage::new(&mut lab);
    let off = "apiVersion: v1\nkind: Namespace\nmetadata: {name: quiet, labels: {shunt.dev/mode: \"off\"}}\n";
    stage.node.write_manifest("quiet.yaml", off).unwrap();
    let _agent = start(&stage.node, &[]);

    let app = "containers: [{name: app}]";
    let sidecar = "containers: [{name: app}, {name: istio-proxy}]";
    let native =
        "containers: [{name: app}], initContainers: [{name: linkerd-proxy, restartPolicy: Always}]";
    // Name, metadata, spec, reason.
    let cases = [
        ("plain", "", app, None),
        (
            "noted",
            "annotations: {shunt.dev/mode: \"off\"}",
            app,
            Some("annotation"),
        ),
        ("of_quiet", "namespace: quiet", app, Some("namespace")),
        ("istio", "", sidecar, Some("mesh")),
        ("linkerd", "", native, Some("mesh")),
        (
            "wants_it",
            "annotations: {shunt.dev/mode: \"on\"}",
            sidecar,
            None,
        ),
    ];
    let pods: Vec<_> = cases
        .iter()
        .map(|(name, ..)| stage.node.pod(name, None).unwrap())
        .collect();
    for (pod, (_, metadata, spec, _)) in pods.iter().zip(&cases) {
        stage.write_pod(pod, metadata, spec);
    }
    let mut expected: Vec<_> = cases
        .iter()
        .filter_map(|(name, _, _, reason)| Some(format!("{name} {}", (*reason)?)))
        .collect();
    expected.sort_unstable();
    wait_until("the pods are known", || stage.left_alone() == expected);

    for (pod, (_, _, _, reason)) in pods.iter().zip(&cases) {
        if reason.is_some() {
            assert_left_alone(&stage, pod, "passed_opted_out");
        } else {
            assert_translated(pod);
        }
    }
    assert_translated(&stage.node);

    // And back: an annotation that is gone, a label that is gone.
    stage.write_pod(&pods[1], "", app);
    stage.node.remove_manifest("quiet.yaml").unwrap();
    wait_until("they are minded again", || {
        stage.left_alone() == ["istio mesh", "linkerd mesh"]
    });
    assert_translated(&pods[1]);
    assert_translated(&pods[2]);
}

#[test]
fn a_pod_is_known_before_it_runs_and_after_the_agent_has_died() {
    let mut lab = Lab::new("early").unwrap();
    let stage = Stage::new(&mut lab);
    let agent = start(&stage.node, &[]);
    let annotated = "annotations: {shunt.dev/mode: \"off\"}";

    // The object comes first, as in life; the kubelet makes the cgroup later.
    let first = stage.node.pod("first", None).unwrap();
    let uid = first.uid().to_owned();
    stage.write_pod(&first, annotated, "");
    wait_until("it is known", || stage.left_alone() == ["first annotation"]);
    first.remove().unwrap();
    wait_until("it is forgotten", || stage.left_alone().is_empty());
    let again = stage.node.pod_with_uid("again", &uid).unwrap();
    wait_until("its cgroup is found", || {
        stage.left_alone() == ["first annotation"]
    });
    assert_left_alone(&stage, &again, "passed_opted_out");

    agent.kill().unwrap();
    assert_left_alone(&stage, &again, "passed_opted_out");
    let agent = start(&stage.node, &[]);
    assert_left_alone(&stage, &again, "passed_opted_out");
    stage.restart(agent, &[]);
}

#[test]
fn datagrams_of_a_pod_that_opted_out_are_left_alone() {
    let mut lab = Lab::new("optudp").unwrap();
    let stage = Stage::new(&mut lab);
    let server = stage.node.pod("dns", None).unwrap();
    let _running = server.serve_udp("0.0.0.0:5353", "dns").unwrap();
    let service = Service {
        name: "dns",
        cluster_ip: "10.96.0.11",
        protocol: "UDP",
        target_port: 5353,
        endpoints: vec![(server.ipv4().into(), "n1")],
        ..Service::default()
    };
    stage
        .node
        .write_manifest("dns.yaml", &service.yaml())
        .unwrap();
    let client = stage.node.pod("client", None).unwrap();
    let _agent = start(&stage.node, &[]);
    for extra in [&[][..], &["--connected"]] {
        let ask = |errno: Option<&str>| {
            let wait = if errno.is_some() { "300" } else { "10000" };
            let args = [&["udp", "10.96.0.11:80", "--timeout-ms", wait], extra].concat();
            let report: Value = client.lab_pod(&args).unwrap();
            assert_eq!(report["errno"].as_str(), errno, "{report}");
        };
        stage.write_pod(&client, "", "");
        wait_until("it is minded", || stage.left_alone().is_empty());
        ask(None);
        stage.write_pod(&client, "annotations: {shunt.dev/mode: \"off\"}", "");
        wait_until("it is left alone", || stage.left_alone().len() == 1);
        ask(Some("timeout"));
    }
}

#[test]
fn host_processes_are_left_alone_if_so_asked() {
    let mut lab = Lab::new("hostoff").unwrap();
    let stage = Stage::new(&mut lab);
    let pod = stage.node.pod("client", None).unwrap();
    let agent = start(&stage.node, &["--host-processes", "off"]);
    assert_left_alone(&stage, &stage.node, "passed_host");
    assert_translated(&pod);
    let status = json(&stage.node, &["status"]);
    assert_eq!(status["clients"]["host_processes"], false);

    let _agent = stage.restart(agent, &["--host-processes", "on"]);
    assert_translated(&stage.node);
    assert_translated(&pod);
}

#[test]
fn bpftool_shows_whom_and_why() {
    let mut lab = Lab::new("optdump").unwrap();
    let stage = Stage::new(&mut lab);
    let pod = stage.node.pod("client", None).unwrap();
    stage.write_pod(&pod, "annotations: {shunt.dev/mode: \"off\"}", "");
    let _agent = start(&stage.node, &[]);
    let dump = dump(&stage.node, "left_alone");
    assert_eq!(dump[0]["value"]["reason"], 0, "{dump:?}");
    let name = dump[0]["value"]["pod"].as_array().unwrap();
    let name: String = name
        .iter()
        .filter_map(|byte| Some(u8::try_from(byte.as_u64()?).ok()? as char))
        .take_while(|byte| *byte != '\0')
        .collect();
    assert_eq!(name, "client");
}
