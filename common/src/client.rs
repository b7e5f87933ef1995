//! Clients that shunt leaves alone: pods that opted out.

use crate::route::{padded, text};

/// Why the connects of a pod pass, and whose they are. The programs only look
/// whether there is one; the rest is for people.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LeftAlone {
    /// [`Reason`].
    reason: u8,
    reserved: [u8; 7],
    namespace: [u8; 64],
    /// A pod name has at most 253 bytes (RFC 1123 subdomain).
    pod: [u8; 256],
}

/// Why a pod is left alone.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Reason {
    /// Its annotation `shunt.dev/mode: off`.
    Annotation = 0,
    /// The label `shunt.dev/mode: off` of its namespace.
    Namespace = 1,
    /// A mesh looks at its connects, and needs to see ClusterIPs.
    Mesh = 2,
}

const _: () = assert!(size_of::<LeftAlone>() == 328 && align_of::<LeftAlone>() == 1);

impl LeftAlone {
    /// Parts that are too long are cut.
    pub fn new(namespace: &str, pod: &str, reason: Reason) -> Self {
        Self {
            reason: reason as u8,
            reserved: [0; 7],
            namespace: padded(namespace),
            pod: padded(pod),
        }
    }

    /// The pod's namespace.
    pub fn namespace(&self) -> &str {
        text(&self.namespace)
    }

    /// The pod's name.
    pub fn pod(&self) -> &str {
        text(&self.pod)
    }

    /// Why; `None` for a number that no version of shunt wrote.
    pub fn reason(&self) -> Option<Reason> {
        let reasons = [Reason::Annotation, Reason::Namespace, Reason::Mesh];
        reasons.into_iter().find(|it| *it as u8 == self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_comes_back() {
        for reason in [Reason::Annotation, Reason::Namespace, Reason::Mesh] {
            let client = LeftAlone::new("shop", "front-0", reason);
            assert_eq!(
                (client.namespace(), client.pod(), client.reason()),
                ("shop", "front-0", Some(reason))
            );
        }
    }
}
