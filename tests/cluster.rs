//! shunt on a real cluster, as an operator installs and removes it. Ignored, since
//! what the nodes run takes minutes to build: `cargo xtask test --root -- --ignored
//! shunt_lives` builds it first.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::path::Path;
use std::process::{Child, Command, Stdio};

use lab::cluster::{Cluster, Machines, write_images};
use lab::fixture::wait_until;
use lab::report::LoadReport;
use lab::{Lab, Node, target_binary};
use serde_json::Value;

const SHOP: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: cart}
spec: {selector: {app: cart}, clusterIP: 10.96.0.80, ports: [{port: 80, targetPort: 8080}]}
";
const CART: &str = "10.96.0.80:80";
/// Long enough for a pod to come or go on a busy machine; only a hang takes so long.
const TIMEOUT: &str = "--timeout=180s";

/// The cluster, and a kubectl that can be started without waiting for it.
struct Stage<'a> {
    cluster: &'a Cluster<'a>,
    kubectl: &'a Path,
}

impl Stage<'_> {
    fn kubectl(&self, words: &str) -> String {
        let words: Vec<_> = words.split(' ').collect();
        self.cluster.kubectl(&words).unwrap()
    }

    /// Applies a folder of deploy/, and waits until all nodes have it.
    fn roll_out(&self, folder: &str) {
        self.kubectl(&format!("apply -k {}", deploy(folder)));
        self.wait_for_rollout();
    }

    fn wait_for_rollout(&self) {
        let wait = "-n shunt-system rollout status daemonset/shunt";
        self.kubectl(&format!("{wait} {TIMEOUT}"));
    }

    /// Connects from the client's pod, so many times.
    fn connect(&self, count: u32) -> LoadReport {
        let exec = "-n shop exec client -- lab-pod connect --count";
        let output = self.kubectl(&format!("{exec} {count} {CART}"));
        serde_json::from_str(&output).unwrap()
    }

    /// Connects from the client's pod, over and over, until told to end.
    fn load(&self) -> Child {
        let words = "-n shop exec -i client -- lab-pod load --threads 2 --until-stdin-closes";
        Command::new(self.kubectl)
            .args(words.split(' '))
            .arg(CART)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// The agent's pod on a node.
    fn agent(&self, node: &str) -> String {
        let select = "-n shunt-system get pods -l app.kubernetes.io/name=shunt -o name";
        let select = format!("{select} --field-selector spec.nodeName={node}");
        self.kubectl(&select).trim().to_owned()
    }

    /// What a command of shunt's CLI says in the agent's pod.
    fn shunt(&self, node: &str, words: &str) -> Value {
        let agent = self.agent(node);
        let exec = format!("-n shunt-system exec {agent} -c agent -- shunt {words} -o json");
        serde_json::from_str(&self.kubectl(&exec)).unwrap()
    }

    /// Ids of the programs in the kernel, and of the links.
    fn ids(&self, node: &str) -> Vec<(&'static str, u64)> {
        let status = self.shunt(node, "status");
        let programs = status["programs"].as_array().unwrap();
        let ids = |kind, field: &str| {
            let ids: Vec<_> = programs
                .iter()
                .filter_map(|it| it[field].as_u64())
                .collect();
            ids.into_iter().map(move |id| (kind, id))
        };
        ids("prog", "program_id")
            .chain(ids("link", "link_id"))
            .collect()
    }
}

fn deploy(folder: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    root.join("deploy/overlays")
        .join(folder)
        .display()
        .to_string()
}

/// Two servers on a node, which say its name.
fn servers(node: &str) -> String {
    format!(
        "---
apiVersion: apps/v1
kind: Deployment
metadata: {{namespace: shop, name: cart-{node}}}
spec:
  replicas: 2
  selector: {{matchLabels: {{app: cart, on: {node}}}}}
  template:
    metadata: {{labels: {{app: cart, on: {node}}}}}
    spec:
      nodeSelector: {{kubernetes.io/hostname: {node}}}
      terminationGracePeriodSeconds: 5
      containers:
      - name: cart
        image: {image}
        imagePullPolicy: Never
        args: [serve, --listen, '0.0.0.0:8080', --id, {node}]
        readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}
",
        image = lab::image::LAB_POD
    )
}

fn client(node: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Pod
metadata: {{namespace: shop, name: client}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 1
  containers: [{{name: client, image: '{image}', imagePullPolicy: Never, args: [pause]}}]
",
        image = lab::image::LAB_POD
    )
}

/// Whether the kernel still has a program or link.
fn exists((kind, id): (&str, u64)) -> bool {
    let id = id.to_string();
    let output = Command::new("bpftool")
        .args([kind, "show", "id", &id])
        .output();
    output.unwrap().status.success()
}

/// Whether there is a pin on the node, in the default place.
fn has_pins(node: &Node) -> bool {
    node.bpffs().join("shunt").exists()
}

#[test]
#[ignore = "needs kubelet and containerd, which take minutes to build"]
fn shunt_lives_on_a_real_cluster_and_leaves_it() {
    let mut lab = Lab::new("real").unwrap();
    let programs = ["shunt", "lab-pod"].map(|name| {
        let variable = name.to_uppercase().replace('-', "_") + "_BIN";
        target_binary(name, &variable).unwrap()
    });
    let images = write_images(lab.folder(), &programs[0], &programs[1]).unwrap();
    let machines = Machines::add(&mut lab, 2).unwrap();
    let cluster = Cluster::start(&lab, &machines, &images, |_| {}).unwrap();
    let folder = lab.folder().join("bin");
    let kubectl = cluster.write_kubectl(&machines, &folder).unwrap();
    let stage = Stage {
        cluster: &cluster,
        kubectl: &kubectl,
    };

    stage.roll_out("lab");
    let objects = [SHOP, &servers("n1"), &servers("n2"), &client("n1")].concat();
    cluster.apply(&objects).unwrap();
    for what in ["deployment/cart-n1", "deployment/cart-n2"] {
        stage.kubectl(&format!("-n shop rollout status {what} {TIMEOUT}"));
    }
    stage.kubectl(&format!(
        "-n shop wait --for=condition=Ready pod/client {TIMEOUT}"
    ));

    only_this_node_answers(&stage);
    agents_are_replaced_under_load(&stage);
    without_endpoints_here_the_other_node_answers(&stage);
    nothing_stays(&stage, &machines);
}

fn only_this_node_answers(stage: &Stage<'_>) {
    wait_until("the agent knows all endpoints", || {
        let routes = stage.shunt("n1", "routes --service shop/cart");
        let tiers = &routes["routes"][0]["tiers"];
        let count = |tier: usize| tiers[tier]["endpoints"].as_array().map(Vec::len);
        (count(0), count(2)) == (Some(2), Some(4))
    });
    let report = stage.connect(1000);
    assert_eq!(report.ids.get("n1"), Some(&1000), "{report:?}");
}

fn agents_are_replaced_under_load(stage: &Stage<'_>) {
    let before = stage.agent("n1");
    let mut load = stage.load();
    stage.kubectl("-n shunt-system rollout restart daemonset/shunt");
    stage.wait_for_rollout();
    assert_ne!(stage.agent("n1"), before);
    drop(load.stdin.take());
    let output = load.wait_with_output().unwrap();
    let report: LoadReport = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report.errnos.is_empty(), "{report:?}");
    // kube-proxy alone would choose the other node for half of them.
    let nodes: Vec<_> = report.ids.keys().collect();
    assert_eq!(nodes, ["n1"]);
    assert!(report.ids["n1"] > 100, "{report:?}");
}

fn without_endpoints_here_the_other_node_answers(stage: &Stage<'_>) {
    stage.kubectl("-n shop scale deployment/cart-n1 --replicas=0");
    let mut answers = LoadReport::default();
    wait_until("the other node answers", || {
        answers = stage.connect(20);
        assert!(answers.errnos.is_empty(), "{answers:?}");
        answers.ids.get("n2") == Some(&20)
    });
}

fn nothing_stays(stage: &Stage<'_>, machines: &Machines) {
    let ids: Vec<_> = ["n1", "n2"].iter().flat_map(|it| stage.ids(it)).collect();
    assert!(
        ids.len() > 20 && ids.iter().all(|id| exists(*id)),
        "{ids:?}"
    );
    assert!(machines.nodes().iter().all(has_pins));
    stage.roll_out("lab-uninstall");
    stage.kubectl(&format!("delete -k {} {TIMEOUT}", deploy("lab-uninstall")));
    for node in machines.nodes() {
        assert!(!has_pins(node), "{}", node.name());
    }
    // The kernel frees programs a little after their last reference.
    wait_until("no program and no link is left", || {
        !ids.iter().any(|id| exists(*id))
    });
    assert_eq!(stage.connect(20).ids.get("n2"), Some(&20));
}
