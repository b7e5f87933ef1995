//! Writing many objects to the API server.

use std::mem::discriminant;
use std::thread;

use anyhow::Result;
use serde_json::Value;

use super::ControlPlane;

/// kubectl writes one object after the other.
const WRITERS: usize = 4;

/// A write to the API server.
#[derive(Clone, Debug)]
pub enum Write {
    /// Of an object that is not there.
    Create(Value),
    /// Of one that is.
    Replace(Value),
    /// By its name.
    Delete {
        /// As kubectl has it.
        kind: &'static str,
        /// Where it is.
        namespace: String,
        /// Its name.
        name: String,
    },
}

impl ControlPlane<'_> {
    /// Writes in this order.
    pub fn write(&self, writes: &[Write]) -> Result<()> {
        writes
            .chunk_by(|a, b| discriminant(a) == discriminant(b))
            .try_for_each(|same| self.write_alike(same))
    }

    /// Creates many objects in any order, over several connections.
    pub fn create_all(&self, objects: &[Value]) -> Result<()> {
        let share = objects.len().div_ceil(WRITERS).max(1);
        let create = |objects| self.kubectl_with_input(&["create", "-f", "-"], &list(objects));
        thread::scope(|scope| {
            let shares = objects.chunks(share);
            let writers: Vec<_> = shares.map(|it| scope.spawn(|| create(it))).collect();
            let mut writers = writers.into_iter();
            writers.try_for_each(|it| it.join().expect("create does not panic").map(drop))
        })
    }

    fn write_alike(&self, writes: &[Write]) -> Result<()> {
        let mut objects = Vec::new();
        for write in writes {
            match write {
                Write::Create(object) | Write::Replace(object) => objects.push(object.clone()),
                Write::Delete {
                    kind,
                    namespace,
                    name,
                } => objects.push(serde_json::json!({
                    "apiVersion": api_version(kind),
                    "kind": kind,
                    "metadata": { "namespace": namespace, "name": name },
                })),
            }
        }
        let arguments: &[&str] = match writes[0] {
            Write::Create(_) => &["create", "-f", "-"],
            Write::Replace(_) => &["replace", "-f", "-"],
            Write::Delete { .. } => &["delete", "--wait=false", "-f", "-"],
        };
        self.kubectl_with_input(arguments, &list(&objects))
            .map(drop)
    }
}

/// A manifest of many objects.
pub fn list(objects: &[Value]) -> String {
    serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string()
}

fn api_version(kind: &str) -> &'static str {
    match kind {
        "EndpointSlice" => "discovery.k8s.io/v1",
        _ => "v1",
    }
}
