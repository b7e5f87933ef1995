//! How each server is started, and configured where it has to be.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Programs, Running, run, sources};
use crate::place::Place;

/// What nginx does.
#[derive(Clone, Copy, Debug)]
pub enum Nginx<'a> {
    /// Serves the bodies.
    Static,
    /// Passes requests on, and lets connections be upgraded.
    Proxy(&'a str),
}

/// PostgreSQL refuses to run as root.
const UNPRIVILEGED: [&str; 3] = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"];
/// Where Debian puts PostgreSQL's versions.
const POSTGRES: &str = "/usr/lib/postgresql";

impl Programs {
    /// redis-server, with nothing on disk.
    pub fn redis(&self, place: &impl Place, port: u16) -> Result<Running> {
        let mut command = place.command("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "0.0.0.0"]);
        command.args(["--protected-mode", "no", "--appendonly", "no", "--save", ""]);
        self.start("redis", port, command)
    }

    /// memcached.
    pub fn memcached(&self, place: &impl Place, port: u16) -> Result<Running> {
        let mut command = place.command("memcached");
        command.args(["-u", "nobody", "-l", "0.0.0.0", "-U", "0", "-I", "4m"]);
        command.args(["-p", &port.to_string()]);
        self.start("memcached", port, command)
    }

    /// nginx, as one process.
    pub fn nginx(&self, place: &impl Place, port: u16, role: Nginx<'_>) -> Result<Running> {
        let folder = self.path("nginx");
        let (location, rest) = match role {
            Nginx::Static => (format!("root {};", self.bodies.display()), String::new()),
            Nginx::Proxy(to) => (
                "proxy_pass http://backend; proxy_http_version 1.1; client_max_body_size 16m;\n\
                 proxy_set_header Upgrade $http_upgrade;\n\
                 proxy_set_header Connection $upgrade;"
                    .to_owned(),
                format!(
                    "upstream backend {{ server {to}; keepalive 32; }}\n\
                     map $http_upgrade $upgrade {{ default upgrade; '' ''; }}"
                ),
            ),
        };
        let text = format!(
            "daemon off; master_process off; user root; pid {folder}/pid; error_log stderr;\n\
             events {{ worker_connections 1024; }}\n\
             http {{\n\
             access_log off; sendfile on; keepalive_requests 1000000;\n\
             client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;\n\
             fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;\n\
             scgi_temp_path {folder}/scgi;\n\
             server {{ listen 0.0.0.0:{port}; location / {{ {location} }} }}\n\
             {rest}\n}}\n",
            folder = folder.display()
        );
        fs::create_dir_all(&folder).context("create nginx's folder")?;
        let path = folder.join("nginx.conf");
        fs::write(&path, text).context("write nginx's configuration")?;
        let mut command = place.command("nginx");
        command.arg("-c").arg(path).args(["-e", "stderr"]);
        self.start("nginx", port, command)
    }

    /// HAProxy before a server, over HTTP or TCP (`mode`), with more options of
    /// its own.
    pub fn haproxy(
        &self,
        place: &impl Place,
        port: u16,
        to: &str,
        mode: &str,
        option: &str,
    ) -> Result<Running> {
        let text = format!(
            "global\n    nbthread 1\ndefaults\n    mode {mode}\n    {option}\n    \
             timeout connect 60s\n    timeout client 60s\n    timeout server 60s\n\
             frontend front\n    bind 0.0.0.0:{port}\n    default_backend back\n\
             backend back\n    server one {to}\n"
        );
        let path = self.path("haproxy");
        fs::write(&path, text).context("write HAProxy's configuration")?;
        let mut command = place.command("haproxy");
        command.args(["-db", "-f"]).arg(path);
        self.start("haproxy", port, command)
    }

    /// PostgreSQL with a new cluster, without a password, and with pgbench's
    /// tables.
    pub fn postgres(&self, place: &impl Place, port: u16) -> Result<Running> {
        let folder = self.path("postgres");
        fs::create_dir_all(&folder).context("create PostgreSQL's folder")?;
        run(Command::new("chown").arg("nobody:nogroup").arg(&folder))?;
        let folder = folder.join("cluster");
        let as_nobody = |mut command: Command, program: &str| -> Result<Command> {
            command.args(UNPRIVILEGED).arg(postgres(program)?);
            command.env_remove("PGDATA").current_dir("/");
            Ok(command)
        };
        let mut initdb = as_nobody(Command::new("setpriv"), "initdb")?;
        initdb.args(["--no-sync", "--auth=trust", "--username=postgres", "-D"]);
        run(initdb.arg(&folder))?;
        let access = folder.join("pg_hba.conf");
        fs::write(&access, "host all all 0.0.0.0/0 trust\n").context("write pg_hba.conf")?;
        let mut server = as_nobody(place.command("setpriv"), "postgres")?;
        server
            .arg("-D")
            .arg(&folder)
            .args(["-p", &port.to_string()]);
        for setting in [
            "listen_addresses=0.0.0.0",
            "unix_socket_directories=",
            "fsync=off",
            "full_page_writes=off",
        ] {
            server.args(["-c", setting]);
        }
        let running = self.start("postgres", port, server)?;
        self.fill_postgres(place, port)?;
        Ok(running)
    }

    fn fill_postgres(&self, place: &impl Place, port: u16) -> Result<()> {
        let mut fill = self.pgbench(place, &format!("127.0.0.1:{port}"))?;
        fill.args(["--initialize", "--quiet", "postgres"]);
        self.finish("pgbench-initialize", fill).map(drop)
    }

    /// Go's net/http, for HTTP/1 and for HTTP/2 without TLS.
    pub fn go_http(&self, place: &impl Place, port: u16) -> Result<Running> {
        self.go_server(place, port, "serve-http", &[])
    }

    /// gRPC in Go.
    pub fn grpc(&self, place: &impl Place, port: u16) -> Result<Running> {
        self.go_server(place, port, "serve-grpc", &[])
    }

    /// A TCP proxy of Go's io.Copy.
    pub fn go_proxy(&self, place: &impl Place, port: u16, to: &str) -> Result<Running> {
        self.go_server(place, port, "proxy", &["-to", to])
    }

    fn go_server(
        &self,
        place: &impl Place,
        port: u16,
        name: &str,
        args: &[&str],
    ) -> Result<Running> {
        let mut command = place.command(self.go());
        command.args([name, "-listen", &format!("0.0.0.0:{port}")]);
        command.arg("-folder").arg(&self.bodies).args(args);
        self.start(name, port, command)
    }

    /// Node's http.
    pub fn node(&self, place: &impl Place, port: u16) -> Result<Running> {
        let mut command = place.command("node");
        command.arg(sources().join("node/server.js"));
        command.arg(port.to_string()).arg(&self.bodies);
        self.start("node", port, command)
    }

    /// The JDK's HTTP server.
    pub fn java(&self, place: &impl Place, port: u16) -> Result<Running> {
        let mut command = self.java_command(place, "Server");
        command.arg(port.to_string()).arg(&self.bodies);
        self.start("java", port, command)
    }

    /// gunicorn, with threads that use blocking sockets.
    pub fn gunicorn(&self, place: &impl Place, port: u16) -> Result<Running> {
        let mut command = place.command("/usr/bin/python3");
        command.args(["-B", "-m", "gunicorn"]);
        command.args(["--worker-class", "gthread", "--threads", "4"]);
        command.args(["--bind", &format!("0.0.0.0:{port}")]);
        command.arg("application:application");
        command.current_dir(sources().join("python"));
        command.env("BODIES", &self.bodies);
        self.start("gunicorn", port, command)
    }

    /// A WebSocket server in Python's asyncio.
    pub fn web_socket(&self, place: &impl Place, port: u16) -> Result<Running> {
        let mut command = place.command("/usr/bin/python3");
        command.arg(sources().join("python/web_socket.py"));
        command.args(["serve", &port.to_string()]);
        self.start("web-socket", port, command)
    }

    /// iperf3.
    pub fn iperf(&self, place: &impl Place, port: u16) -> Result<Running> {
        let mut command = place.command("iperf3");
        command.args(["--server", "--port", &port.to_string()]);
        self.start("iperf3", port, command)
    }
}

/// A program of PostgreSQL, of the newest version that is installed.
pub(super) fn postgres(program: &str) -> Result<PathBuf> {
    let versions = fs::read_dir(POSTGRES).with_context(|| format!("list {POSTGRES}"))?;
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let folders = versions.filter_map(|entry| Some(entry.ok()?.path()));
    let newest = folders.max_by_key(|path| version(path));
    let path = newest.unwrap_or_default().join("bin").join(program);
    ensure!(path.is_file(), "{} is not installed", path.display());
    Ok(path)
}
