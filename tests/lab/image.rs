//! Container images, written without a container engine: an OCI archive is a tar
//! file of an image layout (`image-layout.md` in opencontainers/image-spec), which
//! `ctr images import`, `podman load` and `skopeo copy oci-archive:` read.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::SplitWhitespace;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// An image of one layer, for this machine's architecture.
#[derive(Debug)]
pub struct Image {
    /// With its tag, and with the registry before it, as the container runtime
    /// spells it: `localhost/shunt:0.1.0`.
    pub name: String,
    /// What is run, without arguments of its own.
    pub entrypoint: Vec<String>,
    /// What is in it.
    pub files: Vec<ImageFile>,
}

/// One file of an image.
#[derive(Debug)]
pub struct ImageFile {
    /// Where it comes from.
    pub source: PathBuf,
    /// Its path in the image, without the first slash.
    pub path: String,
    /// Permissions.
    pub mode: u32,
}

/// Name of shunt's image where no registry is, as in deploy/overlays/lab.
pub const SHUNT: &str = concat!("localhost/shunt:", env!("CARGO_PKG_VERSION"));
/// Name of the image with `lab-pod`.
pub const LAB_POD: &str = "localhost/lab-pod:1";
/// Name of the image that each pod begins with.
pub const PAUSE: &str = "localhost/pause:1";

/// Where programs are.
const PATH: &str = "PATH=/usr/local/bin:/usr/bin:/bin";
/// The folders that every image has.
const FOLDERS: [(&str, u32); 6] = [
    ("dev/", 0o755),
    ("etc/", 0o755),
    ("proc/", 0o755),
    ("run/", 0o755),
    ("sys/", 0o755),
    ("tmp/", 0o1777),
];

impl ImageFile {
    /// A program, and the shared libraries that it needs: none, if it is static.
    fn program(source: &Path, name: &str) -> Result<Vec<Self>> {
        let mut files = vec![Self {
            source: source.to_owned(),
            path: format!("usr/local/bin/{name}"),
            mode: 0o755,
        }];
        files.extend(libraries(source)?.into_iter().map(|library| Self {
            path: library.trim_start_matches('/').to_owned(),
            source: library.into(),
            mode: 0o755,
        }));
        Ok(files)
    }
}

/// Paths of the shared libraries that a program needs, the loader among them
/// (ldd(1)).
fn libraries(program: &Path) -> Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).output();
    // A static program is a failure of ldd's.
    let output = output.context("start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.lines().map(|line| line.split_whitespace());
    let path =
        |mut words: SplitWhitespace<'_>| words.find(|it| it.starts_with('/')).map(str::to_owned);
    Ok(words.filter_map(path).collect())
}

impl Image {
    /// What is installed on nodes, the same as deploy/Dockerfile makes.
    pub fn of_shunt(program: &Path) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let licence = |name: &str| ImageFile {
            source: root.join(name),
            path: format!("usr/share/doc/shunt/{name}"),
            mode: 0o644,
        };
        let mut files = vec![licence("LICENSE-APACHE"), licence("LICENSE-MIT")];
        files.extend(ImageFile::program(program, "shunt")?);
        Ok(Self {
            name: SHUNT.to_owned(),
            entrypoint: vec!["shunt".to_owned()],
            files,
        })
    }

    /// What runs inside pods of a cluster.
    pub fn of_lab_pod(program: &Path) -> Result<Self> {
        Ok(Self {
            name: LAB_POD.to_owned(),
            entrypoint: vec!["lab-pod".to_owned()],
            files: ImageFile::program(program, "lab-pod")?,
        })
    }

    /// What holds the namespaces of each pod of a cluster.
    pub fn of_pause(program: &Path) -> Result<Self> {
        Ok(Self {
            name: PAUSE.to_owned(),
            entrypoint: ["lab-pod", "pause"].map(str::to_owned).to_vec(),
            ..Self::of_lab_pod(program)?
        })
    }

    /// Writes the archive. The same files give the same archive. It appears when
    /// it is whole.
    ///
    /// # Errors
    ///
    /// A file can't be read, or the archive can't be written.
    pub fn write(&self, output: &Path) -> Result<()> {
        let mut unfinished = output.as_os_str().to_owned();
        unfinished.push(".unfinished");
        let unfinished = PathBuf::from(unfinished);
        self.try_write(&unfinished)
            .and_then(|()| fs::rename(&unfinished, output).context("name it"))
            .inspect_err(|_| drop(fs::remove_file(&unfinished)))
            .with_context(|| format!("write {}", output.display()))
    }

    fn try_write(&self, output: &Path) -> Result<()> {
        let layer = self.layer()?;
        let config = self.config(&layer);
        let manifest = manifest(&config, &layer);
        let mut archive = Archive::new(File::create(output)?);
        archive.add("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        archive.add("index.json", 0o644, &self.index(&manifest))?;
        for blob in [&config, &manifest, &layer] {
            archive.add(&format!("blobs/sha256/{}", hash(blob)), 0o644, blob)?;
        }
        archive.finish()?.sync_all().context("sync")
    }

    /// Not compressed: what it is used for here is on this machine, and whoever
    /// pushes it to a registry compresses it then.
    fn layer(&self) -> Result<Vec<u8>> {
        let mut layer = Archive::new(Vec::new());
        for (folder, mode) in FOLDERS {
            layer.add_folder(folder, mode)?;
        }
        for file in &self.files {
            let content = fs::read(&file.source)
                .with_context(|| format!("read {}", file.source.display()))?;
            layer.add(&file.path, file.mode, &content)?;
        }
        layer.finish()
    }

    fn config(&self, layer: &[u8]) -> Vec<u8> {
        bytes(&json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Env": [PATH],
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
            "history": [{"created_by": "cargo xtask image"}],
        }))
    }

    /// The runtime takes the name from an annotation, which containerd calls its own.
    fn index(&self, manifest: &[u8]) -> Vec<u8> {
        let tag = self.name.rsplit(':').next().unwrap_or_default();
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", manifest);
        entry["platform"] = json!({"architecture": architecture(), "os": "linux"});
        entry["annotations"] = json!({
            "io.containerd.image.name": self.name,
            "org.opencontainers.image.ref.name": tag,
        });
        bytes(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [entry],
        }))
    }
}

fn manifest(config: &[u8], layer: &[u8]) -> Vec<u8> {
    bytes(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
    }))
}

fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(blob), "size": blob.len()})
}

fn digest(blob: &[u8]) -> String {
    format!("sha256:{}", hash(blob))
}

fn hash(blob: &[u8]) -> String {
    Sha256::digest(blob)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn bytes(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

/// As Go names it, which the specification asks for.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// A tar file of root's files, without times.
struct Archive<W: Write>(tar::Builder<W>);

impl<W: Write> Archive<W> {
    fn new(output: W) -> Self {
        Self(tar::Builder::new(output))
    }

    fn add(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(mode);
        header.set_size(u64::try_from(content.len())?);
        let added = self.0.append_data(&mut header, path, content);
        added.with_context(|| format!("add {path}"))
    }

    fn add_folder(&mut self, path: &str, mode: u32) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(mode);
        header.set_size(0);
        let added = self.0.append_data(&mut header, path, &[][..]);
        added.with_context(|| format!("add {path}"))
    }

    fn finish(self) -> Result<W> {
        self.0.into_inner().context("end the archive")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;

    /// Path to mode and content.
    fn read(archive: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
        let mut archive = tar::Archive::new(archive);
        let read = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            (path, (entry.header().mode().unwrap(), content))
        };
        archive.entries().unwrap().map(read).collect()
    }

    /// The blob that a descriptor names, which has to be what it says.
    fn blob<'a>(files: &'a BTreeMap<String, (u32, Vec<u8>)>, descriptor: &Value) -> &'a [u8] {
        let name = descriptor["digest"].as_str().unwrap().replace(':', "/");
        let (_, content) = &files[&format!("blobs/{name}")];
        assert_eq!(digest(content), descriptor["digest"]);
        assert_eq!(content.len(), descriptor["size"]);
        content
    }

    #[test]
    fn an_archive_says_what_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("program");
        fs::write(&source, "#!").unwrap();
        let image = Image {
            name: "localhost/shunt:1".to_owned(),
            entrypoint: vec!["shunt".to_owned()],
            files: vec![ImageFile {
                source,
                path: "usr/local/bin/shunt".to_owned(),
                mode: 0o755,
            }],
        };
        let output = folder.path().join("image.tar");
        image.write(&output).unwrap();
        let first = fs::read(&output).unwrap();
        let files = read(&first);
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();

        let index = json(&files["index.json"].1);
        let entry = &index["manifests"][0];
        let names = &entry["annotations"];
        assert_eq!(names["io.containerd.image.name"], "localhost/shunt:1");
        assert_eq!(names["org.opencontainers.image.ref.name"], "1");
        let manifest = json(blob(&files, entry));
        let config = json(blob(&files, &manifest["config"]));
        let layer = blob(&files, &manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"], json!([digest(layer)]));
        assert_eq!(config["config"]["Entrypoint"], json!(["shunt"]));
        let content = read(layer);
        assert_eq!(content["usr/local/bin/shunt"], (0o755, b"#!".to_vec()));
        assert_eq!(content["tmp/"].0, 0o1777);

        image.write(&output).unwrap();
        assert_eq!(fs::read(&output).unwrap(), first);
    }

    #[test]
    fn the_dockerfile_makes_the_same() {
        let dockerfile = include_str!("../../deploy/Dockerfile");
        let (_, last) = dockerfile.rsplit_once("\nFROM ").unwrap();
        let image = Image::of_shunt(Path::new("/nothing/shunt")).unwrap();
        for file in &image.files {
            let (folder, name) = file.path.rsplit_once('/').unwrap();
            let copied = last.lines().any(|line| {
                line.starts_with("COPY ") && line.contains(name) && line.contains(folder)
            });
            assert!(copied, "{}", file.path);
        }
        assert!(last.contains(&format!("ENV {PATH}\n")));
        assert!(last.contains(&format!("ENTRYPOINT {}\n", json!(image.entrypoint))));
    }

    #[test]
    fn a_file_that_is_not_there_leaves_no_archive() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("image.tar");
        let image = Image {
            name: "localhost/shunt:1".to_owned(),
            entrypoint: Vec::new(),
            files: vec![ImageFile {
                source: folder.path().join("nothing"),
                path: "nothing".to_owned(),
                mode: 0o644,
            }],
        };
        let error = format!("{:#}", image.write(&output).unwrap_err());
        assert!(error.contains("nothing"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
