//! The manifests in deploy/, as `kubectl kustomize` renders them. Needs kubectl
//! but no cluster and no root.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// Rendered manifests.
struct Rendered(Vec<Value>);

impl Rendered {
    /// Renders a folder below deploy/.
    fn of(folder: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let output = Command::new("kubectl")
            .arg("kustomize")
            .arg(root.join("deploy").join(folder))
            .output()
            .expect("kubectl is on the PATH");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{folder}: {errors}");
        Self(serde_saphyr::from_multiple(&String::from_utf8(output.stdout).unwrap()).unwrap())
    }

    /// The one object of a kind.
    fn get(&self, kind: &str) -> &Value {
        let found: Vec<_> = self.0.iter().filter(|it| it["kind"] == kind).collect();
        assert_eq!(found.len(), 1, "{kind}");
        found[0]
    }

    fn pod(&self) -> &Value {
        &self.get("DaemonSet")["spec"]["template"]["spec"]
    }

    /// Command and arguments of a container, with variables filled in.
    fn command_line(&self, container: &Value) -> Vec<String> {
        let settings = &self.get("ConfigMap")["data"];
        let mut variables = BTreeMap::new();
        for variable in items(&container["env"]) {
            let reference = &variable["valueFrom"]["configMapKeyRef"];
            let Some(key) = reference["key"].as_str() else {
                continue;
            };
            assert_eq!(reference["name"], self.get("ConfigMap")["metadata"]["name"]);
            let value = settings[key].as_str().expect("a setting is a string");
            variables.insert(format!("$({})", text(&variable["name"])), value);
        }
        let words = items(&container["command"]).chain(items(&container["args"]));
        words
            .map(|word| {
                let word = text(word).to_owned();
                variables
                    .iter()
                    .fold(word, |word, (name, value)| word.replace(name, value))
            })
            .collect()
    }
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a string")
}

/// Whether shunt understands the command line. `--help` comes last, so it is
/// obeyed only if everything before it was accepted.
fn accepts(command_line: &[String]) -> bool {
    let [program, args @ ..] = command_line else {
        panic!("no command");
    };
    assert_eq!(program, "shunt");
    Command::new(lab::target_binary("shunt", "SHUNT_BIN").unwrap())
        .args(args)
        .arg("--help")
        .env("NODE_NAME", "n1")
        .output()
        .unwrap()
        .status
        .success()
}

/// Path in the container and path on the node of each mount.
fn mounts<'a>(pod: &'a Value, container: &'a Value) -> BTreeMap<&'a str, &'a str> {
    let on_node: BTreeMap<_, _> = items(&pod["volumes"])
        .map(|it| (text(&it["name"]), text(&it["hostPath"]["path"])))
        .collect();
    items(&container["volumeMounts"])
        .map(|it| (text(&it["mountPath"]), on_node[text(&it["name"])]))
        .collect()
}

#[test]
fn the_base_has_everything_and_nothing_else() {
    let base = Rendered::of("base");
    let kinds: Vec<_> = base.0.iter().map(|it| text(&it["kind"])).collect();
    let expected = [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "DaemonSet",
        "Namespace",
        "ServiceAccount",
    ];
    assert_eq!(kinds.len(), expected.len());
    assert_eq!(BTreeSet::from_iter(kinds), BTreeSet::from(expected));
    let labels = &base.get("Namespace")["metadata"]["labels"];
    assert_eq!(labels["pod-security.kubernetes.io/enforce"], "privileged");
    for kind in ["ConfigMap", "DaemonSet", "ServiceAccount"] {
        let namespace = &base.get(kind)["metadata"]["namespace"];
        assert_eq!(
            *namespace,
            base.get("Namespace")["metadata"]["name"],
            "{kind}"
        );
    }
}

#[test]
fn the_agent_may_list_and_watch_what_it_reads() {
    let base = Rendered::of("base");
    let expected = json!([
        {"apiGroups": [""], "resources": ["services", "nodes", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]);
    assert_eq!(base.get("ClusterRole")["rules"], expected);
    let binding = base.get("ClusterRoleBinding");
    let account = base.get("ServiceAccount");
    assert_eq!(binding["roleRef"]["kind"], "ClusterRole");
    assert_eq!(
        binding["roleRef"]["name"],
        base.get("ClusterRole")["metadata"]["name"]
    );
    assert_eq!(
        binding["subjects"],
        json!([{
            "kind": "ServiceAccount",
            "name": account["metadata"]["name"],
            "namespace": account["metadata"]["namespace"],
        }])
    );
    assert_eq!(
        base.pod()["serviceAccountName"],
        account["metadata"]["name"]
    );
}

#[test]
fn the_agent_understands_its_flags() {
    let base = Rendered::of("base");
    let line = base.command_line(&base.pod()["containers"][0]);
    assert_eq!(
        line,
        [
            "shunt",
            "agent",
            "--prefer=node",
            "--stale-after=60s",
            "--metrics-addr=0.0.0.0:10270"
        ]
    );
    assert!(accepts(&line));
    let wrong = ["shunt", "agent", "--prefer=moon"].map(str::to_owned);
    assert!(!accepts(&wrong), "the check would not notice a wrong value");
}

#[test]
fn prometheus_and_the_kubelet_find_the_agent() {
    let base = Rendered::of("base");
    let agent = &base.pod()["containers"][0];
    let line = base.command_line(agent);
    let address = line
        .iter()
        .find_map(|word| word.strip_prefix("--metrics-addr="))
        .unwrap();
    let port: std::net::SocketAddr = address.parse().unwrap();
    let port = port.port();
    let declared = &agent["ports"][0];
    assert_eq!(declared["containerPort"], port);
    let metadata = &base.get("DaemonSet")["spec"]["template"]["metadata"];
    let expected = json!({
        "prometheus.io/scrape": "true",
        "prometheus.io/port": port.to_string(),
        "prometheus.io/path": "/metrics",
    });
    assert_eq!(metadata["annotations"], expected);
    let expected = json!({ "path": "/healthz", "port": declared["name"] });
    assert_eq!(agent["readinessProbe"]["httpGet"], expected);
}

#[test]
fn the_agent_reaches_the_node() {
    let base = Rendered::of("base");
    let pod = base.pod();
    let agent = &pod["containers"][0];
    let expected = [
        ("/sys/fs/bpf", "/sys/fs/bpf"),
        ("/sys/fs/cgroup", "/sys/fs/cgroup"),
    ];
    assert_eq!(mounts(pod, agent), BTreeMap::from(expected));
    assert_eq!(agent["securityContext"]["privileged"], true);
    assert_eq!(
        (&pod["hostPID"], &pod["hostNetwork"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(pod["tolerations"], json!([{"operator": "Exists"}]));
    let node_name = items(&agent["env"]).find(|it| it["name"] == "NODE_NAME");
    let path = &node_name.unwrap()["valueFrom"]["fieldRef"]["fieldPath"];
    assert_eq!(path, "spec.nodeName");
    // What this mounts has to be the node's.
    let first = &pod["initContainers"][0];
    let line = base.command_line(first);
    assert_eq!(line, ["shunt", "mount-bpffs"]);
    assert!(accepts(&line));
    let mount = &first["volumeMounts"][0];
    assert_eq!(
        (text(&mount["mountPath"]), text(&mount["mountPropagation"])),
        ("/sys/fs/bpf", "Bidirectional")
    );
}

#[test]
fn the_overlay_prefers_the_zone() {
    let overlay = Rendered::of("overlays/prefer-zone");
    let line = overlay.command_line(&overlay.pod()["containers"][0]);
    assert_eq!(
        line,
        [
            "shunt",
            "agent",
            "--prefer=zone",
            "--stale-after=60s",
            "--metrics-addr=0.0.0.0:10270"
        ]
    );
    assert!(accepts(&line));
    // Another name, so that the agents are restarted.
    let name = |rendered: &Rendered| rendered.get("ConfigMap")["metadata"]["name"].clone();
    assert_ne!(name(&overlay), name(&Rendered::of("base")));
}

#[test]
fn the_overlay_uninstalls_in_place_of_the_agents() {
    let base = Rendered::of("base");
    let overlay = Rendered::of("overlays/uninstall");
    assert_eq!(
        overlay.get("DaemonSet")["metadata"],
        base.get("DaemonSet")["metadata"]
    );
    let pod = overlay.pod();
    let [first] = pod["initContainers"].as_array().unwrap().as_slice() else {
        panic!("one init container");
    };
    let line = overlay.command_line(first);
    assert_eq!(line, ["shunt", "uninstall"]);
    assert!(accepts(&line));
    assert_eq!(
        mounts(pod, first),
        BTreeMap::from([("/sys/fs/bpf", "/sys/fs/bpf")])
    );
    assert_eq!(first["securityContext"]["privileged"], true);
    let [rest] = pod["containers"].as_array().unwrap().as_slice() else {
        panic!("one container");
    };
    let line = overlay.command_line(rest);
    assert_eq!(line, ["shunt", "pause"]);
    assert!(accepts(&line));
    let template = &overlay.get("DaemonSet")["spec"]["template"];
    assert!(template["metadata"]["annotations"]["prometheus.io/scrape"].is_null());
    assert!(rest["readinessProbe"].is_null() && rest["ports"].is_null());
}

#[test]
fn the_overlays_of_the_lab_have_its_image() {
    for folder in ["overlays/lab", "overlays/lab-uninstall"] {
        let rendered = Rendered::of(folder);
        let pod = rendered.pod();
        for container in items(&pod["initContainers"]).chain(items(&pod["containers"])) {
            assert_eq!(text(&container["image"]), lab::image::SHUNT, "{folder}");
        }
    }
}

#[test]
fn all_images_are_of_this_version() {
    let expected = format!("shunt:{}", env!("CARGO_PKG_VERSION"));
    for folder in ["base", "overlays/prefer-zone", "overlays/uninstall"] {
        let rendered = Rendered::of(folder);
        let pod = rendered.pod();
        for container in items(&pod["initContainers"]).chain(items(&pod["containers"])) {
            assert_eq!(
                text(&container["image"]),
                expected,
                "{folder}: {}",
                container["name"]
            );
        }
    }
}
