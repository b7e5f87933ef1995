//! A real Kubernetes control plane on a lab node: etcd and kube-apiserver; and
//! the real kube-proxy, which it judges shunt by ([`choices`]).
//!
//! The programs come from `tests/kube`; `cargo xtask setup` builds them once a
//! machine. They run in the node's network namespace and cgroup, so that they
//! end with the lab, whatever end its owner comes to.

mod certificates;

pub mod choices;
mod proxy;
mod write;

use std::env;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::certificates::Certificates;
pub use self::proxy::{KubeProxy, ProxyMode};
pub use self::write::{Write, list};
use crate::lab::create_folder;
use crate::node::Node;
use crate::place::Place;

/// Version of all of Kubernetes' programs, as in `tests/kube/kubernetes/go.mod`.
pub const VERSION: &str = "1.37.2";
/// What the folder of the programs holds.
pub const PROGRAMS: [&str; 5] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kubectl",
];

const ETCD: &str = "http://127.0.0.1:2379";
const PORT: u16 = 6443;
/// Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(120);
const ADMIN_TOKEN: &str = "admin-of-the-lab";
const PROXY_TOKEN: &str = "kube-proxy-of-the-lab";

/// Where the programs are: `SHUNT_KUBE_DIR`, or a folder for this version in the
/// user's cache.
///
/// # Errors
///
/// Neither is known.
pub fn programs() -> Result<PathBuf> {
    cached(&format!("kube-{VERSION}"))
}

/// Where built programs are that carry this name: in `SHUNT_KUBE_DIR`, or in the
/// user's cache.
pub(crate) fn cached(name: &str) -> Result<PathBuf> {
    if let Some(folder) = env::var_os("SHUNT_KUBE_DIR") {
        return Ok(folder.into());
    }
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    let cache = cache.context("set HOME, XDG_CACHE_HOME or SHUNT_KUBE_DIR")?;
    Ok(cache.join("shunt").join(name))
}

/// A running control plane; dropping it ends it.
pub struct ControlPlane<'a> {
    node: &'a Node,
    folder: PathBuf,
    kubeconfig: PathBuf,
    certificates: Certificates,
    serves: Serves,
    _etcd: Running,
    api_server: Option<Running>,
}

/// Whom the API server is for.
#[derive(Clone, Copy, PartialEq)]
enum Serves {
    /// Whoever has a kubeconfig.
    Clients,
    /// Kubelets and pods, too.
    Nodes,
}

/// A child that ends when this is dropped.
pub(crate) struct Running(pub(crate) Child);

/// Somebody who speaks to the API server, by a token.
pub(crate) struct User {
    name: String,
    /// Empty, or one.
    group: String,
    token: String,
}

impl User {
    pub(crate) fn new(name: &str, group: &str) -> Self {
        Self {
            name: name.to_owned(),
            group: group.to_owned(),
            // Nobody else reaches the server.
            token: format!("{}-of-the-lab", name.replace(':', "-")),
        }
    }

    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// A line of `--token-auth-file`.
    fn line(&self) -> String {
        let Self { name, group, token } = self;
        format!("{token},{name},{name},{group}\n")
    }
}

impl<'a> ControlPlane<'a> {
    /// Starts it on a node, and waits until it answers.
    pub fn start(node: &'a Node) -> Result<Self> {
        Self::start_with(node, Serves::Clients, &[])
    }

    /// As [`ControlPlane::start`], for a cluster with kubelets.
    pub(crate) fn start_for_nodes(node: &'a Node, users: &[User]) -> Result<Self> {
        Self::start_with(node, Serves::Nodes, users)
    }

    fn start_with(node: &'a Node, serves: Serves, users: &[User]) -> Result<Self> {
        let folder = node.folder().join("control-plane");
        create_folder(&folder)?;
        let certificates = Certificates::create(&folder, node.ipv4().into())?;
        // The API server's own roles name these users.
        let mut tokens = format!(
            "{ADMIN_TOKEN},admin,admin,system:masters\n\
             {PROXY_TOKEN},system:kube-proxy,kube-proxy\n"
        );
        tokens.extend(users.iter().map(User::line));
        fs::write(folder.join("tokens"), tokens).context("write the tokens")?;
        let etcd = start(node, &folder, "etcd", &etcd_arguments(&folder))?;
        let mut plane = Self {
            node,
            kubeconfig: folder.join("admin.kubeconfig"),
            folder,
            certificates,
            serves,
            _etcd: etcd,
            api_server: None,
        };
        plane.write_kubeconfig(&plane.kubeconfig, ADMIN_TOKEN)?;
        plane.start_api_server()?;
        Ok(plane)
    }

    /// A kubeconfig with all rights.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The certificate that tells this control plane.
    pub(crate) fn authority(&self) -> &Path {
        &self.certificates.authority
    }

    /// What the controllers need to make tokens for pods.
    pub(crate) fn accounts_arguments(&self) -> Vec<String> {
        let Certificates {
            account_key,
            authority,
            ..
        } = &self.certificates;
        vec![
            "--use-service-account-credentials=true".to_owned(),
            format!(
                "--service-account-private-key-file={}",
                account_key.display()
            ),
            format!("--root-ca-file={}", authority.display()),
        ]
    }

    /// Writes a kubeconfig for the bearer of a token.
    pub fn write_kubeconfig(&self, path: &Path, token: &str) -> Result<()> {
        let server = format!("https://{}:{PORT}", self.node.ipv4());
        let authority = self.certificates.authority.display();
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: lab\n\
             clusters: [{{name: lab, cluster: {{server: '{server}', certificate-authority: \
             '{authority}'}}}}]\n\
             users: [{{name: lab, user: {{token: '{token}'}}}}]\n\
             contexts: [{{name: lab, context: {{cluster: lab, user: lab}}}}]\n"
        );
        fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Runs kubectl with all rights and returns what it prints.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_with_input(args, "")
    }

    /// Creates or changes the objects of a manifest.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        let args = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
        self.kubectl_with_input(&args, manifest).map(drop)
    }

    /// Writes all objects that shunt reads into the manifests of a node.
    pub fn write_objects(&self, node: &Node) -> Result<()> {
        let kinds = "services,endpointslices,nodes";
        let all = self.kubectl(&["get", kinds, "--all-namespaces", "-o", "yaml"])?;
        node.write_manifest("all.yaml", &all)
    }

    /// Kills the API server (SIGKILL); what etcd holds stays.
    pub fn stop_api_server(&mut self) {
        self.api_server = None;
    }

    /// Starts it again, and waits until it answers.
    pub fn start_api_server(&mut self) -> Result<()> {
        let arguments = self.api_server_arguments();
        let mut running = start(self.node, &self.folder, "kube-apiserver", &arguments)?;
        let deadline = Instant::now() + PATIENCE;
        let log = || log_end(&self.folder, "kube-apiserver");
        while self.kubectl(&["get", "--raw", "/readyz"]).is_err() {
            if let Some(status) = running.0.try_wait().context("look after kube-apiserver")? {
                bail!("kube-apiserver ended ({status}): {}", log());
            }
            ensure!(Instant::now() < deadline, "kube-apiserver hangs: {}", log());
            thread::sleep(Duration::from_millis(100));
        }
        self.api_server = Some(running);
        Ok(())
    }

    /// As [`ControlPlane::kubectl`], with standard input.
    pub fn kubectl_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let mut child = self
            .node
            .command(programs()?.join("kubectl"))
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(args)
            // Discovery is cached in the home directory otherwise.
            .env("HOME", &self.folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start kubectl")?;
        let mut stdin = child.stdin.take().context("stdin is piped")?;
        let written = stdin.write_all(input.as_bytes());
        drop(stdin);
        let output = child.wait_with_output().context("wait for kubectl")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "kubectl {args:?} failed: {complaint}"
        );
        written.context("write to kubectl")?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn api_server_arguments(&self) -> Vec<String> {
        let path = |name: &str| self.folder.join(name).display().to_string();
        let certificates = &self.certificates;
        let mut arguments = vec![
            format!("--etcd-servers={ETCD}"),
            format!("--bind-address={}", self.node.ipv4()),
            format!("--secure-port={PORT}"),
            format!("--tls-cert-file={}", certificates.server.display()),
            format!(
                "--tls-private-key-file={}",
                certificates.server_key.display()
            ),
            format!("--cert-dir={}", path("certificates")),
            format!("--token-auth-file={}", path("tokens")),
            "--allow-privileged=true".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!(
                "--service-account-key-file={}",
                certificates.account_public_key.display()
            ),
            format!(
                "--service-account-signing-key-file={}",
                certificates.account_key.display()
            ),
            "--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112".to_owned(),
        ];
        arguments.extend(match self.serves {
            Serves::Clients => vec![
                // Nobody is to reach it through a Service.
                "--endpoint-reconciler-type=none".to_owned(),
                "--authorization-mode=RBAC".to_owned(),
            ],
            Serves::Nodes => self.arguments_for_nodes(),
        });
        arguments
    }

    fn arguments_for_nodes(&self) -> Vec<String> {
        let certificates = &self.certificates;
        vec![
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            format!("--advertise-address={}", self.node.ipv4()),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
            format!(
                "--kubelet-client-certificate={}",
                certificates.client.display()
            ),
            format!("--kubelet-client-key={}", certificates.client_key.display()),
        ]
    }
}

/// The end of a program's log, for errors.
pub(crate) fn log_end(folder: &Path, program: &str) -> String {
    let log = fs::read(folder.join(format!("{program}.log"))).unwrap_or_default();
    let log = String::from_utf8_lossy(&log).into_owned();
    let lines: Vec<_> = log.lines().rev().take(20).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

fn etcd_arguments(folder: &Path) -> Vec<String> {
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={ETCD}"),
        format!("--advertise-client-urls={ETCD}"),
        "--listen-peer-urls=http://127.0.0.1:2380".to_owned(),
        // The data goes with the lab.
        "--unsafe-no-fsync".to_owned(),
    ]
}

fn start(node: &Node, folder: &Path, program: &str, arguments: &[String]) -> Result<Running> {
    start_program(node, folder, &programs()?.join(program), arguments)
}

/// Starts a program in the node's host network, with its log in the folder.
pub(crate) fn start_program(
    node: &Node,
    folder: &Path,
    path: &Path,
    arguments: &[String],
) -> Result<Running> {
    let name = path.file_name().context("the program has no name")?;
    let program = name.to_string_lossy();
    ensure!(
        path.exists(),
        "{} is not built: run `cargo xtask setup`",
        path.display()
    );
    let log = folder.join(format!("{program}.log"));
    let log = File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let child = node
        .command(path)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share the log")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {program}"))?;
    Ok(Running(child))
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_version_is_that_of_the_module() {
        let module = include_str!("../kube/kubernetes/go.mod");
        assert!(module.contains(&format!("k8s.io/kubernetes v{}", super::VERSION)));
    }
}
