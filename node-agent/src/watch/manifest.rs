//! One manifest file: text to objects; pure.

use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::model::convert::{self, Reason, Rejected};
use crate::model::{Kind, Object, ObjectRef};

/// What one document of a file holds.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Document {
    /// Objects, good and bad; empty if it holds nothing that shunt reads.
    Objects(Vec<Result<Object, Rejected>>),
    /// It can't be read.
    Unreadable(String),
}

/// The documents of a file, in order. A line that begins with `---` separates
/// them, as for kubectl, so that a syntax error spoils only its own.
pub(super) fn parse(text: &str) -> Vec<Document> {
    let mut documents = Vec::new();
    for (index, (line, text)) in split(text).into_iter().enumerate() {
        if is_blank(text) {
            continue;
        }
        documents.push(match parse_document(text) {
            Ok(objects) => Document::Objects(objects),
            Err(_) => Document::Unreadable(format!(
                "document {} is not valid YAML or JSON: {}",
                index + 1,
                explain(text, line)
            )),
        });
    }
    documents
}

/// Each document and the number of its first line.
fn split(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut start, mut first_line, mut at) = (0, 1, 0);
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        if line.starts_with("---") {
            documents.push((first_line, &text[start..at]));
            // What follows on the line itself is a comment or nothing.
            (start, first_line) = (at + line.len(), number + 1);
        }
        at += line.len();
    }
    documents.push((first_line, &text[start..]));
    documents
}

fn is_blank(text: &str) -> bool {
    text.lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
}

fn parse_document(text: &str) -> Result<Vec<Result<Object, Rejected>>, Box<serde_saphyr::Error>> {
    // JSON is YAML, but its own parser is faster, and large lists are JSON.
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(_) => serde_saphyr::from_str(text)?,
    };
    let mut objects = Vec::new();
    collect(value, &mut objects);
    Ok(objects)
}

/// What is wrong, on one line, with the line of the file and not that of the
/// document.
fn explain(text: &str, first_line: usize) -> String {
    let whole = "\n".repeat(first_line - 1) + text;
    let error = match serde_saphyr::from_str::<Value>(&whole) {
        Ok(_) => return format!("see from line {first_line}"),
        Err(error) => error.to_string(),
    };
    let line = error.lines().next().unwrap_or_default();
    line.trim_start_matches("error: ").to_owned()
}

fn collect(value: Value, objects: &mut Vec<Result<Object, Rejected>>) {
    let text = |key: &str| {
        value
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    match (text("apiVersion").as_str(), text("kind").as_str()) {
        ("v1", "Service") => objects.extend(read(value, Kind::Service, |it: Service| {
            convert::service(it).map(|service| Some(Object::Service(service)))
        })),
        ("discovery.k8s.io/v1", "EndpointSlice") => {
            objects.extend(read(value, Kind::EndpointSlice, |it: EndpointSlice| {
                Ok(convert::endpoint_slice(it)?.map(Object::EndpointSlice))
            }));
        }
        ("v1", "Node") => objects.extend(read(value, Kind::Node, |it: Node| {
            Ok(Some(Object::Node(convert::node(&it.metadata))))
        })),
        ("v1", "Pod") => objects.extend(read(value, Kind::Pod, |it: Pod| {
            Ok(Some(Object::Pod(convert::pod(&it))))
        })),
        ("v1", "Namespace") => objects.extend(read(value, Kind::Namespace, |it: Namespace| {
            Ok(Some(Object::Namespace(convert::namespace(&it.metadata))))
        })),
        (version, kind) => {
            if let Some(item_kind) = kind.strip_suffix("List") {
                collect_list(value, version, item_kind, objects);
            }
        }
    }
}

/// The items of a `List` say what they are; those of a `ServiceList` need not.
fn collect_list(
    mut list: Value,
    version: &str,
    item_kind: &str,
    objects: &mut Vec<Result<Object, Rejected>>,
) {
    let Some(Value::Array(items)) = list.get_mut("items").map(Value::take) else {
        return;
    };
    for mut item in items {
        if let Value::Object(fields) = &mut item {
            fields.entry("kind").or_insert_with(|| item_kind.into());
            fields.entry("apiVersion").or_insert_with(|| version.into());
        }
        collect(item, objects);
    }
}

fn read<T: DeserializeOwned>(
    value: Value,
    kind: Kind,
    convert: impl FnOnce(T) -> Result<Option<Object>, Rejected>,
) -> Option<Result<Object, Rejected>> {
    let metadata = value.get("metadata").cloned().unwrap_or_default();
    match T::deserialize(value) {
        Ok(parsed) => convert(parsed).transpose(),
        Err(error) => Some(Err(malformed(kind, &metadata, &error))),
    }
}

/// The object has the wrong shape; its name may still be readable.
fn malformed(kind: Kind, metadata: &Value, error: &serde_json::Error) -> Rejected {
    let metadata = readable(metadata);
    let name = convert::name_of(kind, &metadata);
    let service = convert::owner(&metadata);
    Rejected {
        object: ObjectRef { kind, name },
        service,
        reason: Reason::Malformed(error.to_string()),
    }
}

/// What names the object, and the labels that can be read: the others may be what
/// is wrong.
fn readable(metadata: &Value) -> ObjectMeta {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let labels = metadata["labels"].as_object().into_iter().flatten();
    let labels = labels.filter_map(|(key, value)| Some((key.clone(), text(value)?)));
    ObjectMeta {
        name: text(&metadata["name"]),
        namespace: text(&metadata["namespace"]),
        labels: Some(labels.collect()),
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: cart}\n\
                           spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n";

    fn names(documents: &[Document]) -> Vec<String> {
        let of = |document: &Document| match document {
            Document::Unreadable(why) => vec![format!("unreadable: {why}")],
            Document::Objects(objects) => objects
                .iter()
                .map(|object| match object {
                    Ok(object) => object.reference().to_string(),
                    Err(rejected) => rejected.to_string(),
                })
                .collect(),
        };
        documents.iter().flat_map(of).collect()
    }

    #[test]
    fn a_syntax_error_spoils_only_its_own_document_and_is_placed() {
        let text = format!("# head\n---\n{SERVICE}---\nkind: [\n--- # next\n{SERVICE}");
        let found = names(&parse(&text));
        assert_eq!(
            (found.len(), found[0].as_str(), found[2].as_str()),
            (3, "Service default/cart", "Service default/cart")
        );
        assert!(
            found[1].starts_with("unreadable: document 3 is not valid YAML or JSON: line 8 "),
            "{found:?}"
        );
    }

    #[test]
    fn lists_are_taken_apart_and_other_kinds_passed_over() {
        let list = r#"{"apiVersion":"v1","kind":"List","items":[
            {"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"}},
            {"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"x"}}]}"#;
        assert_eq!(names(&parse(list)), ["Node n1"]);
        let typed = r#"{"apiVersion":"v1","kind":"ServiceList","items":[{"metadata":{"name":"a","namespace":"b"}}]}"#;
        assert_eq!(names(&parse(typed)), ["Service b/a"]);
    }

    #[test]
    fn an_object_of_the_wrong_shape_is_rejected_by_name() {
        let text = SERVICE.replace("port: 80", "port: eighty");
        let found = names(&parse(&text));
        assert!(
            found[0].starts_with("Service default/cart is left out:"),
            "{found:?}"
        );
        for (kind, expected) in [
            ("v1, kind: Node", "Node a is left out: invalid type: null"),
            (
                "v1, kind: Service",
                "Service b/a is left out: invalid type: null",
            ),
        ] {
            let text = format!(
                "{{apiVersion: {kind}, metadata: {{name: a, namespace: b, labels: {{zone: null}}}}}}"
            );
            let found = names(&parse(&text));
            assert!(found[0].starts_with(expected), "{found:?}");
        }
    }

    /// So that the connects of that Service pass.
    #[test]
    fn a_slice_of_the_wrong_shape_tells_its_service() {
        let text = "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: x, \
                    namespace: b, labels: {kubernetes.io/service-name: a, other: null}}}";
        let [Document::Objects(objects)] = &parse(text)[..] else {
            panic!("one document");
        };
        let service = objects[0].as_ref().unwrap_err().service.as_ref().unwrap();
        assert_eq!((&*service.namespace, &*service.name), ("b", "a"));
    }

    #[test]
    fn a_slice_of_names_is_nothing_to_be_read() {
        let text = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: x}\n\
                    addressType: FQDN\nendpoints: [{addresses: [a.example]}]\n";
        assert_eq!(parse(text), [Document::Objects(vec![])]);
    }
}
