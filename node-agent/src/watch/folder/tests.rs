//! The folder on a real file system, and the contents without one.

use std::fs::OpenOptions;
use std::io::Write as _;

use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::timeout;

use super::*;
use crate::model::{Kind, ObjectName, ObjectRef};

/// Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(20);

fn service(name: &str, port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{clusterIP: 10.96.0.1, ports: [{{port: {port}}}]}}\n"
    )
}

fn reference(name: &str) -> ObjectRef {
    let name = ObjectName {
        namespace: "default".into(),
        name: name.into(),
    };
    ObjectRef {
        kind: Kind::Service,
        name,
    }
}

/// The ports of the Service, or nothing if it is not there.
fn ports(state: &State, name: &str) -> Vec<u16> {
    let service = state.services().find(|service| &*service.name.name == name);
    service
        .map(|service| service.ports.iter().map(|port| port.port).collect())
        .unwrap_or_default()
}

/// A folder that is followed.
struct Followed {
    directory: tempfile::TempDir,
    events: Receiver<Vec<Event>>,
    state: State,
    /// Every port that the Service `cart` ever had.
    history: Vec<Vec<u16>>,
}

impl Followed {
    async fn with(files: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let (sender, events) = channel(64);
        let path = directory.path().to_owned();
        tokio::spawn(async move { follow(&path, &sender, &SourceHealth::default()).await });
        let mut followed = Self {
            directory,
            events,
            state: State::default(),
            history: Vec::new(),
        };
        followed.until(State::is_synced).await;
        followed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn until(&mut self, holds: impl Fn(&State) -> bool) {
        let waiting = async {
            while !holds(&self.state) {
                for event in self.events.recv().await.unwrap() {
                    self.state.apply(event);
                    self.history.push(ports(&self.state, "cart"));
                }
            }
        };
        timeout(PATIENCE, waiting)
            .await
            .expect("the change is seen");
    }
}

#[tokio::test]
async fn changes_deletions_and_renames_are_followed() {
    let mut followed = Followed::with(&[("a.yaml", &service("cart", 80))]).await;
    assert_eq!(ports(&followed.state, "cart"), [80]);

    fs::write(followed.path("a.yaml"), service("cart", 81)).unwrap();
    followed.until(|state| ports(state, "cart") == [81]).await;
    // As editors do it.
    fs::write(followed.path(".a.swp"), service("cart", 82)).unwrap();
    fs::rename(followed.path(".a.swp"), followed.path("a.yaml")).unwrap();
    followed.until(|state| ports(state, "cart") == [82]).await;
    fs::rename(followed.path("a.yaml"), followed.path("b.yaml")).unwrap();
    fs::write(followed.path("c.yaml"), service("pay", 90)).unwrap();
    followed.until(|state| ports(state, "pay") == [90]).await;
    assert_eq!(ports(&followed.state, "cart"), [82]);
    fs::remove_file(followed.path("b.yaml")).unwrap();
    followed
        .until(|state| ports(state, "cart").is_empty())
        .await;
}

#[tokio::test]
async fn a_writer_that_truncates_first_makes_nothing_vanish() {
    let mut followed = Followed::with(&[("a.yaml", &service("cart", 1))]).await;
    for port in 2..60 {
        let path = followed.path("a.yaml");
        let mut file = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(path)
            .unwrap();
        if port % 3 == 0 {
            // Closes it blank, too.
            drop(file);
            tokio::time::sleep(Duration::from_millis(5)).await;
            file = OpenOptions::new()
                .write(true)
                .open(followed.path("a.yaml"))
                .unwrap();
        }
        file.write_all(service("cart", port).as_bytes()).unwrap();
        drop(file);
        followed.until(|state| ports(state, "cart") == [port]).await;
    }
    assert!(
        followed.history.iter().all(|ports| !ports.is_empty()),
        "{:?}",
        followed.history
    );
    fs::write(followed.path("a.yaml"), "").unwrap();
    followed
        .until(|state| ports(state, "cart").is_empty())
        .await;
}

#[tokio::test]
async fn the_symlinks_of_a_config_map_volume_are_followed() {
    let mut followed = Followed::with(&[]).await;
    for (directory, port) in [("..1", 80), ("..2", 81)] {
        fs::create_dir(followed.path(directory)).unwrap();
        fs::write(
            followed.path(directory).join("a.yaml"),
            service("cart", port),
        )
        .unwrap();
        std::os::unix::fs::symlink(directory, followed.path("..data_tmp")).unwrap();
        fs::rename(followed.path("..data_tmp"), followed.path("..data")).unwrap();
        if !followed.path("a.yaml").exists() {
            std::os::unix::fs::symlink("..data/a.yaml", followed.path("a.yaml")).unwrap();
        }
        followed.until(|state| ports(state, "cart") == [port]).await;
    }
}

#[tokio::test]
async fn a_folder_that_is_replaced_is_followed_again() {
    let parent = tempfile::tempdir().unwrap();
    let (folder, other) = (parent.path().join("manifests"), parent.path().join("other"));
    fs::create_dir(&folder).unwrap();
    fs::create_dir(&other).unwrap();
    fs::write(folder.join("a.yaml"), service("cart", 80)).unwrap();
    fs::write(other.join("a.yaml"), service("cart", 81)).unwrap();
    let (sender, events) = channel(64);
    let path = folder.clone();
    tokio::spawn(async move { follow(&path, &sender, &SourceHealth::default()).await });
    let mut followed = Followed {
        directory: parent,
        events,
        state: State::default(),
        history: Vec::new(),
    };
    followed.until(State::is_synced).await;

    fs::remove_dir_all(&folder).unwrap();
    fs::rename(&other, &folder).unwrap();
    followed.until(|state| ports(state, "cart") == [81]).await;
    fs::write(folder.join("a.yaml"), service("cart", 82)).unwrap();
    followed.until(|state| ports(state, "cart") == [82]).await;
}

#[test]
fn a_missing_folder_says_what_is_needed() {
    let error = read(Path::new("/no/such/folder")).unwrap_err().to_string();
    assert!(
        error.contains("/no/such/folder") && error.contains("--from"),
        "{error}"
    );
}

fn update(contents: &mut Contents, path: &str, text: &str) -> Update {
    contents.update(PathBuf::from(path), Some(Ok(text.to_owned())))
}

#[test]
fn a_file_that_breaks_keeps_the_objects_it_held() {
    let mut contents = Contents::default();
    update(
        &mut contents,
        "a.yaml",
        &format!("{}---\n{}", service("cart", 80), service("pay", 90)),
    );

    let broken = format!("{}---\nkind: [\n", service("cart", 81));
    let change = update(&mut contents, "a.yaml", &broken);

    assert_eq!(
        change.events.len(),
        1,
        "cart is changed, pay stays: {change:?}"
    );
    assert!(
        change.complaints[0].contains("a.yaml: document 2"),
        "{change:?}"
    );
    let mended = update(&mut contents, "a.yaml", &service("cart", 81));
    assert_eq!(mended.events, [Event::Delete(reference("pay"))]);
}

#[test]
fn a_file_that_was_never_whole_may_hold_anything() {
    let mut contents = Contents::default();
    let change = update(&mut contents, "a.yaml", "kind: [\n");
    assert_eq!(change.events, [Event::Unreadable(1)]);
    let change = update(&mut contents, "a.yaml", "kind: Other\n");
    assert_eq!(change.events, [Event::Unreadable(0)]);
}

#[test]
fn an_object_in_two_files_counts_once_and_is_complained_of() {
    let mut contents = Contents::default();
    update(&mut contents, "b.yaml", &service("cart", 80));
    let first = update(&mut contents, "a.yaml", &service("cart", 81));
    assert!(
        matches!(&first.events[..], [Event::Apply(_)]),
        "a.yaml comes first: {first:?}"
    );
    let second = update(&mut contents, "b.yaml", &service("cart", 82));
    assert_eq!(second.events, []);
    assert!(second.complaints[0].contains("a.yaml too"), "{second:?}");

    let gone = contents.update(PathBuf::from("a.yaml"), None);
    assert!(
        matches!(&gone.events[..], [Event::Apply(_)]),
        "b.yaml takes over: {gone:?}"
    );
    let gone = contents.update(PathBuf::from("b.yaml"), None);
    assert_eq!(gone.events, [Event::Delete(reference("cart"))]);
}
