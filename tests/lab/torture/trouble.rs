//! What befalls the agent while connections are spliced: it is killed at random
//! moments, and told to take all of them back to TCP.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::fixture::{PATIENCE, READY};
use crate::random::Random;
use crate::{Agent, Node};

/// Which program is the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// What is installed.
    Shunt,
    /// One that has faults if it is asked to.
    Faulty,
}

/// What befalls the agent, and for how long.
#[derive(Clone, Copy, Debug)]
pub enum Trouble<'a> {
    /// It is killed, and the splice switched off and on.
    All(Duration),
    /// The splice is switched off and on.
    Switches(Duration),
    /// It has each of these faults, so many times, and ends by each.
    Crashes(&'a [&'a str], usize),
}

/// The agent of a node, and how to start another one.
pub(super) struct Troubled<'a> {
    node: &'a Node,
    program: Program,
    args: Vec<&'a str>,
    agent: Option<Agent>,
    pub(super) counts: Counts,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Agents that were started.
    pub starts: u64,
    /// Agents that were killed.
    pub kills: u64,
    /// Times that the splice was switched off.
    pub switches: u64,
}

impl<'a> Troubled<'a> {
    /// Starts the agent and waits until it is ready.
    pub(super) fn start(node: &'a Node, program: Program, args: &[&'a str]) -> Result<Self> {
        let mut troubled = Self {
            node,
            program,
            args: args.to_vec(),
            agent: None,
            counts: Counts::default(),
        };
        troubled.revive()?;
        troubled.wait_until_ready()?;
        Ok(troubled)
    }

    /// Makes trouble. Afterwards an agent runs and the splice is on.
    pub(super) fn trouble(&mut self, random: &mut Random, trouble: Trouble<'_>) -> Result<()> {
        match trouble {
            Trouble::All(time) => self.all(random, Instant::now() + time),
            Trouble::Switches(time) => {
                let until = Instant::now() + time;
                while Instant::now() < until {
                    pause(random, 100..1500);
                    self.switch_off_for(random, |_| Ok(()))?;
                }
                Ok(())
            }
            Trouble::Crashes(faults, times) => {
                for fault in faults {
                    for _ in 0..times {
                        self.crash(fault)
                            .with_context(|| format!("an agent with the fault {fault}"))?;
                    }
                }
                self.revive()?;
                self.wait_until_ready()
            }
        }
    }

    fn all(&mut self, random: &mut Random, until: Instant) -> Result<()> {
        while Instant::now() < until {
            pause(random, 100..1500);
            match random.below(4) {
                0 => {
                    self.kill()?;
                    pause(random, 0..300);
                }
                // In its first moments, when it adopts what is there.
                1 => {
                    self.kill()?;
                    self.revive()?;
                    self.wait_until_ready()?;
                    pause(random, 0..60);
                    self.kill()?;
                }
                2 => self.switch_off_for(random, |_| Ok(()))?,
                _ => self.switch_off_for(random, Self::kill)?,
            }
            if self.agent.is_none() {
                self.revive()?;
                // How long it takes is not left to chance: on a busy machine it
                // would rarely live.
                self.wait_until_ready()?;
            }
        }
        Ok(())
    }

    /// Ends the agent.
    pub(super) fn stop(mut self) -> Result<Counts> {
        let agent = self.agent.take().context("an agent runs")?;
        agent.stop()?;
        Ok(self.counts)
    }

    /// Switches the splice off, and on again whether all are back or not.
    fn switch_off_for(
        &mut self,
        random: &mut Random,
        meanwhile: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let mut off = self.node.shunt_command(&["splice", "off"])?;
        // It waits until all are back, and complains of being ended.
        let off = off.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut off = off.context("start shunt splice off")?;
        self.counts.switches += 1;
        pause(random, 0..400);
        meanwhile(self)?;
        pause(random, 0..300);
        off.kill().context("end shunt splice off")?;
        off.wait().context("wait for shunt splice off")?;
        let on = self.node.shunt(&["splice", "on"])?;
        ensure!(on.status.success(), "shunt splice on: {on:?}");
        Ok(())
    }

    /// Lets an agent end by its fault.
    fn crash(&mut self, fault: &str) -> Result<()> {
        self.kill()?;
        let agent = self
            .node
            .faulty_agent(&[&self.args[..], &["--fault", fault]].concat())?;
        self.counts.starts += 1;
        let status = agent.wait_for_end(PATIENCE)?;
        ensure!(status.signal() == Some(9), "it ended otherwise: {status}");
        self.counts.kills += 1;
        Ok(())
    }

    fn kill(&mut self) -> Result<()> {
        if let Some(agent) = self.agent.take() {
            agent.kill()?;
            self.counts.kills += 1;
        }
        Ok(())
    }

    fn revive(&mut self) -> Result<()> {
        self.agent = Some(match self.program {
            Program::Shunt => self.node.agent(&self.args)?,
            Program::Faulty => self.node.faulty_agent(&self.args)?,
        });
        self.counts.starts += 1;
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let agent = self.agent.as_mut().context("an agent runs")?;
        agent.wait_for_log(READY, PATIENCE)
    }
}

/// Waits for some milliseconds of this range.
fn pause(random: &mut Random, range: std::ops::Range<u64>) {
    let spread = usize::try_from(range.end - range.start).expect("a second or so");
    thread::sleep(Duration::from_millis(range.start) + millis(random.below(spread)));
}

fn millis(count: usize) -> Duration {
    Duration::from_millis(count as u64)
}
