//! The control plane's own certificate authority and keys.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};

/// Of the Service `kubernetes`: the first of the range.
const CLUSTER_IP: &str = "10.96.0.1";

/// Files in PEM.
pub(super) struct Certificates {
    /// Certificate of the authority.
    pub(super) authority: PathBuf,
    /// Certificate of the API server, and its key.
    pub(super) server: PathBuf,
    pub(super) server_key: PathBuf,
    /// By which the API server is known to kubelets, and its key.
    pub(super) client: PathBuf,
    pub(super) client_key: PathBuf,
    /// What signs the tokens of ServiceAccounts, and what checks them.
    pub(super) account_key: PathBuf,
    pub(super) account_public_key: PathBuf,
}

impl Certificates {
    /// Makes new ones for an API server at this address.
    pub(super) fn create(folder: &Path, address: IpAddr) -> Result<Self> {
        let mut authority = CertificateParams::new(Vec::new()).context("authority")?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority_key = KeyPair::generate().context("key of the authority")?;
        let authority_certificate = authority.self_signed(&authority_key).context("authority")?;
        let issuer = Issuer::new(authority, authority_key);
        let server_key = KeyPair::generate().context("key of the server")?;
        let client_key = KeyPair::generate().context("key of the client")?;
        let client = client()
            .and_then(|client| client.signed_by(&client_key, &issuer))
            .context("certificate of the client")?;
        let server = CertificateParams::new(vec![address.to_string(), CLUSTER_IP.to_owned()])
            .and_then(|server| server.signed_by(&server_key, &issuer))
            .context("certificate of the server")?;
        let account_key = KeyPair::generate().context("key of the accounts")?;
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
            Ok::<_, anyhow::Error>(path)
        };
        Ok(Self {
            authority: write("authority.pem", authority_certificate.pem())?,
            server: write("server.pem", server.pem())?,
            server_key: write("server-key.pem", server_key.serialize_pem())?,
            client: write("client.pem", client.pem())?,
            client_key: write("client-key.pem", client_key.serialize_pem())?,
            account_key: write("account-key.pem", account_key.serialize_pem())?,
            account_public_key: write("account-public-key.pem", account_key.public_key_pem())?,
        })
    }
}

/// In the group that may do everything.
fn client() -> Result<CertificateParams, rcgen::Error> {
    let mut client = CertificateParams::new(Vec::new())?;
    let name = &mut client.distinguished_name;
    name.push(DnType::CommonName, "kube-apiserver");
    name.push(DnType::OrganizationName, "system:masters");
    client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    Ok(client)
}
