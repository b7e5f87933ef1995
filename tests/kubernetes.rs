//! The agent against a real API server.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::fs;
use std::path::{Path, PathBuf};

use lab::fixture::{PATIENCE, READY, Service, json, live_endpoints, planned, stderr, wait_until};
use lab::kubernetes::ControlPlane;
use lab::report::ConnectReport;
use lab::{Lab, Node, Place as _, Pod, Server, target_binary};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";

const NODES: &str = "
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/zone: z1}}
---
apiVersion: v1
kind: Node
metadata: {name: n2, labels: {topology.kubernetes.io/zone: z2}}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
";

/// Two nodes with a server each, and a client on the first.
struct Stage {
    n1: Node,
    _n2: Node,
    client: Pod,
    near: Pod,
    far: Pod,
    _running: [Server; 2],
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let (n1, n2) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
        let client = n1.pod("client", None).unwrap();
        let (near, far) = (n1.pod("near", None).unwrap(), n2.pod("far", None).unwrap());
        let running = [&near, &far].map(|pod| pod.serve("0.0.0.0:8080", pod.name()).unwrap());
        Self {
            n1,
            _n2: n2,
            client,
            near,
            far,
            _running: running,
        }
    }

    /// The Service with the far endpoint, and the near one if it is asked for.
    fn manifest(&self, with_near: bool) -> String {
        let mut endpoints = vec![(self.far.ipv4().into(), "n2")];
        if with_near {
            endpoints.push((self.near.ipv4().into(), "n1"));
        }
        Service {
            endpoints,
            ..Service::default()
        }
        .yaml()
    }

    fn answer(&self) -> String {
        self.client.connect(CART).unwrap().id.unwrap()
    }
}

#[test]
fn the_agent_follows_the_api_server_also_over_its_restart() {
    let mut lab = Lab::new("api").unwrap();
    let stage = Stage::new(&mut lab);
    let mut plane = ControlPlane::start(&stage.n1).unwrap();
    plane.apply(NODES).unwrap();
    plane.apply(&stage.manifest(true)).unwrap();
    let mut agent = stage.n1.agent_of_cluster(plane.kubeconfig(), &[]).unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();
    assert_eq!(stage.answer(), "near");
    assert_eq!(json(&stage.n1, &["routes"])["zone"], "z1");

    plane.apply(&stage.manifest(false)).unwrap();
    wait_until("the near endpoint is gone", || stage.answer() == "far");

    plane.stop_api_server();
    assert_eq!(stage.answer(), "far");
    plane.start_api_server().unwrap();
    plane.apply(&stage.manifest(true)).unwrap();
    wait_until("the near endpoint is back", || stage.answer() == "near");

    plane
        .kubectl(&["-n", "shop", "delete", "service", "cart"])
        .unwrap();
    wait_until("the Service is kube-proxy's", || {
        live_endpoints(&stage.n1, "shop/cart", "cluster").is_empty()
    });
}

#[test]
fn the_live_table_is_the_plan_of_what_the_server_holds() {
    let mut lab = Lab::new("apiplan").unwrap();
    let stage = Stage::new(&mut lab);
    let plane = ControlPlane::start(&stage.n1).unwrap();
    plane.apply(NODES).unwrap();
    plane.apply(&stage.manifest(true)).unwrap();
    let service = |name: &str, spec: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: shop, name: {name}}}\n\
             spec: {{{spec}, ports: [{{port: 53, protocol: UDP}}]}}\n"
        )
    };
    let others = [
        service("dual", "ipFamilyPolicy: PreferDualStack"),
        service("none", "clusterIP: None"),
        service("away", "type: ExternalName, externalName: shop.example.org"),
        service(
            "sticky",
            "sessionAffinity: ClientIP, internalTrafficPolicy: Local",
        ),
        service("near", "trafficDistribution: PreferClose"),
        service("outside", "type: NodePort"),
    ];
    plane.apply(&others.concat()).unwrap();
    let mut agent = stage.n1.agent_of_cluster(plane.kubeconfig(), &[]).unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();

    plane.write_objects(&stage.n1).unwrap();
    let plan = planned(&stage.n1, &[]);
    assert_eq!(json(&stage.n1, &["routes"]), plan);
    let names = plan["routes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["service"].as_str().unwrap());
    // With the API server's own, in the namespace `default`.
    let expected = [
        "kubernetes",
        "cart",
        "dual",
        "dual",
        "near",
        "outside",
        "sticky",
    ];
    assert_eq!(names.collect::<Vec<_>>(), expected);
}

/// Creates what `deploy/base` has, which the server's validation has to accept,
/// and returns a kubeconfig of its ServiceAccount.
fn account_of_deploy(lab: &Lab, plane: &ControlPlane<'_>) -> PathBuf {
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/base");
    let rendered = plane.kubectl(&["kustomize", base]).unwrap();
    plane.apply(&rendered).unwrap();
    let token = plane
        .kubectl(&["-n", "shunt-system", "create", "token", "shunt"])
        .unwrap();
    let kubeconfig = lab.folder().join("shunt.kubeconfig");
    plane.write_kubeconfig(&kubeconfig, token.trim()).unwrap();
    kubeconfig
}

/// Changes a field of the ClusterRole's rule about EndpointSlices.
fn set_rule(plane: &ControlPlane<'_>, field: &str, words: &[&str]) {
    let path = format!("/rules/1/{field}");
    let patch = serde_json::json!([{ "op": "replace", "path": path, "value": words }]);
    let args = ["patch", "clusterrole", "shunt", "--type=json", "--patch"];
    plane
        .kubectl(&[&args[..], &[&patch.to_string()]].concat())
        .unwrap();
}

#[test]
fn a_missing_right_is_named_and_asked_for_again() {
    let mut lab = Lab::new("verb").unwrap();
    let stage = Stage::new(&mut lab);
    let plane = ControlPlane::start(&stage.n1).unwrap();
    plane.apply(NODES).unwrap();
    plane.apply(&stage.manifest(false)).unwrap();
    let kubeconfig = account_of_deploy(&lab, &plane);
    set_rule(&plane, "verbs", &["list"]);
    let mut agent = stage.n1.agent_of_cluster(&kubeconfig, &[]).unwrap();
    let missing = "cannot watch resource \"endpointslices\"";
    agent.wait_for_log(missing, PATIENCE).unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();
    assert_eq!(stage.answer(), "far");

    set_rule(&plane, "verbs", &["list", "watch"]);
    plane.apply(&stage.manifest(true)).unwrap();
    wait_until("the change is followed", || stage.answer() == "near");
}

/// `shunt plan` and `shunt explain` with the rights of the agent.
fn explain_by_the_server(node: &Node, kubeconfig: &Path) {
    let run = |args: &[&str]| -> Value {
        let output = node
            .command(target_binary("shunt", "SHUNT_BIN").unwrap())
            .args(args)
            .args(["--node", "n1", "-o", "json"])
            .env("KUBECONFIG", kubeconfig)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(run(&["plan"]), json(node, &["routes"]));
    let pins = node.pins().display().to_string();
    let report = run(&["explain", "shop/cart", "--pins", &pins]);
    assert_eq!(report["zone"], "z1");
    assert_eq!(report["ports"][0]["live"]["state"], "same");
}

#[test]
fn pods_of_the_server_that_opted_out_are_left_alone() {
    let mut lab = Lab::new("podapi").unwrap();
    let stage = Stage::new(&mut lab);
    let plane = ControlPlane::start(&stage.n1).unwrap();
    plane.apply(NODES).unwrap();
    plane.apply(&stage.manifest(true)).unwrap();
    let kubeconfig = account_of_deploy(&lab, &plane);
    let mut agent = stage.n1.agent_of_cluster(&kubeconfig, &[]).unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();
    // Made by a controller, which does not run here.
    plane
        .apply("apiVersion: v1\nkind: ServiceAccount\nmetadata: {namespace: shop, name: default}\n")
        .unwrap();
    let left_alone = || {
        let status = json(&stage.n1, &["status"]);
        let pods = status["clients"]["left_alone"].as_array().unwrap().clone();
        let names = pods.iter().map(|it| it["pod"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    let pod = |name: &str, node: &str, annotations: &str| {
        let yaml = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: shop, name: {name}, annotations: \
             {{{annotations}}}}}\nspec: {{nodeName: {node}, containers: [{{name: app, image: app}}]}}\n"
        );
        plane.apply(&yaml).unwrap();
        let args = [
            "-n",
            "shop",
            "get",
            "pod",
            name,
            "-o",
            "jsonpath={.metadata.uid}",
        ];
        let uid = plane.kubectl(&args).unwrap();
        stage.n1.pod_with_uid(name, uid.trim()).unwrap()
    };
    let off = "shunt.dev/mode: \"off\"";
    let (quiet, other) = (pod("quiet", "n1", off), pod("other", "n1", ""));
    // One of another node, as if its cgroup were here.
    let elsewhere = pod("elsewhere", "n2", off);
    wait_until("it is known", || left_alone() == ["quiet"]);
    let answer = |pod: &Pod| pod.connect(CART).unwrap().id;
    let assert_unanswered = |pod: &Pod| {
        let report: ConnectReport = pod
            .lab_pod(&["connect", CART, "--timeout-ms", "300"])
            .unwrap();
        assert_eq!(report.id, None);
    };
    assert_unanswered(&quiet);
    assert_eq!(answer(&other).as_deref(), Some("near"));
    assert_eq!(answer(&elsewhere).as_deref(), Some("near"));

    // All pods of the namespace, but for the one that says otherwise.
    let label = ["label", "namespace", "shop", "shunt.dev/mode=off"];
    plane.kubectl(&label).unwrap();
    wait_until("the label is known", || left_alone() == ["quiet", "other"]);
    assert_unanswered(&other);
    let unlabel = ["label", "namespace", "shop", "shunt.dev/mode-"];
    plane.kubectl(&unlabel).unwrap();
    let minded = ["-n", "shop", "annotate", "pod", "quiet", "shunt.dev/mode-"];
    plane.kubectl(&minded).unwrap();
    wait_until("nobody is left alone", || left_alone().is_empty());
    assert_eq!(answer(&quiet).as_deref(), Some("near"));
    assert_eq!(answer(&other).as_deref(), Some("near"));
}

#[test]
fn the_cluster_role_of_deploy_is_enough_and_all_of_it_is_needed() {
    let mut lab = Lab::new("rbac").unwrap();
    let stage = Stage::new(&mut lab);
    let plane = ControlPlane::start(&stage.n1).unwrap();
    plane.apply(NODES).unwrap();
    plane.apply(&stage.manifest(true)).unwrap();
    let kubeconfig = account_of_deploy(&lab, &plane);

    set_rule(&plane, "resources", &["none"]);
    let mut agent = stage.n1.agent_of_cluster(&kubeconfig, &[]).unwrap();
    agent.wait_for_log("kind=EndpointSlice", PATIENCE).unwrap();
    assert!(!agent.read_log().contains(READY), "{}", agent.read_log());
    set_rule(&plane, "resources", &["endpointslices"]);

    agent.wait_for_log(READY, PATIENCE).unwrap();
    assert_eq!(stage.answer(), "near");
    explain_by_the_server(&stage.n1, &kubeconfig);
    assert_eq!(
        fs::read_dir(stage.n1.manifests()).unwrap().count(),
        0,
        "nothing else was read"
    );
}
