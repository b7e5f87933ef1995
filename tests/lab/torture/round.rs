//! One round: two pods on a node of their own, its agent, connections of all kinds,
//! and trouble.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::TortureReport;
use super::lane::{IDS_OF_ROUND, Lanes, Load, write_services};
use super::trouble::{Counts, Program, Trouble, Troubled};
use crate::random::Random;
use crate::{Lab, LogOutput, Node, Options};

/// How a round is.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// What plans and trouble are drawn from.
    pub seed: u64,
    /// Its number within the run.
    pub number: u64,
    /// What befalls the agent while new connections are made.
    pub trouble: Trouble<'a>,
    /// As [`Options::steering`].
    pub steering: u32,
    /// Connections at once, of each of the six lanes.
    pub parallel: usize,
    /// A connection of which nothing moves for so long is hung.
    pub patience: Duration,
    /// The agent.
    pub program: Program,
    /// Its arguments, besides those that make it splice.
    pub args: &'a [&'a str],
    /// When its log is printed.
    pub logs: LogOutput,
}

/// What a round came to.
#[derive(Clone, Debug, Default)]
pub struct RoundReport {
    /// What both ends of the connections saw.
    pub torture: TortureReport,
    /// Promotions, less those of the agents' own connections.
    pub promotions: u64,
    /// Demotions, likewise.
    pub demotions: u64,
    /// Messages that went past TCP.
    pub messages: u64,
    /// What was done to the agent.
    pub trouble: Counts,
}

/// Two connections of its own test the kernel, each time that an agent starts.
const OWN: u64 = 2;
/// How long sockets may take to be closed that nobody has any more.
const CLOSING: Duration = Duration::from_secs(60);

impl Round<'_> {
    /// Runs it, and checks that it leaves nothing in the maps.
    ///
    /// # Errors
    ///
    /// Something of it could not be run, or pairs or members are left.
    pub fn run(&self) -> Result<RoundReport> {
        let options = Options {
            logs: self.logs,
            steering: self.steering,
        };
        let mut lab = Lab::with("torture", options)?;
        let node = lab.node("n1")?;
        let (client, web) = (node.pod("client", None)?, node.pod("web", None)?);
        write_services(&node, &web)?;
        let args = [&["--splice", "auto", "--splice-after", "0ms"], self.args].concat();
        let mut agent = Troubled::start(&node, self.program, &args)?;
        let load = Load {
            seed: self.seed,
            parallel: self.parallel,
            patience_ms: self.patience.as_millis(),
            first_id: self.number * IDS_OF_ROUND,
        };
        let lanes = Lanes::start(&node, &client, &web, &load)?;
        agent.trouble(&mut Random::new(self.seed), self.trouble)?;
        let torture = lanes.finish()?;
        wait_until_empty(&node)?;
        let status = status(&node)?;
        let counter = |name: &str| -> Result<u64> {
            let value = status["counters"][name].as_u64();
            value.with_context(|| format!("no counter {name}"))
        };
        let trouble = agent.stop()?;
        let own = OWN * trouble.starts;
        Ok(RoundReport {
            promotions: counter("promotions")?.saturating_sub(own),
            demotions: counter("demotions")?.saturating_sub(own),
            messages: counter("messages_spliced")?,
            torture,
            trouble,
        })
    }
}

/// Waits until no socket is left in the maps of the splice.
fn wait_until_empty(node: &Node) -> Result<()> {
    let deadline = Instant::now() + CLOSING;
    loop {
        let used = used(node)?;
        if used.iter().all(|(_, used)| *used == 0) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "connections are over, but in the maps is left: {used:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn used(node: &Node) -> Result<Vec<(&'static str, u64)>> {
    let status = status(node)?;
    let maps = status["maps"].as_array().context("maps")?;
    let used = |name| {
        let map = maps.iter().find(|map| map["name"] == name);
        let used = map.and_then(|map| map["used"].as_u64());
        Ok((name, used.with_context(|| format!("no map {name}"))?))
    };
    ["pairs", "splice"].into_iter().map(used).collect()
}

fn status(node: &Node) -> Result<Value> {
    let output = node.shunt(&["status", "-o", "json"])?;
    ensure!(output.status.success(), "shunt status: {output:?}");
    serde_json::from_slice(&output.stdout).context("read shunt status")
}
