//! A client of HTTP/1.1, as far as the metrics need one.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use anyhow::{Context, Result};
use lab::report::HttpReport;

use crate::GetArgs;
use crate::socket;

pub(crate) fn get(args: &GetArgs) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&args.to, args.timeout_ms)
        .with_context(|| format!("connect to {}", args.to))?;
    stream
        .set_read_timeout(Some(args.timeout_ms))
        .context("set a timeout")?;
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        args.path, args.to
    );
    stream.write_all(request.as_bytes()).context("ask")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("read")?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the answer has a head")?;
    let status = head.split(' ').nth(1).context("the head has a status")?;
    socket::print(&HttpReport {
        status: status.parse().context("the status is a number")?,
        head: head.to_owned(),
        body: body.to_owned(),
    })
}
