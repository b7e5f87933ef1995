//! What spliced connections do, held against TCP: every byte, error and end of
//! many connections at once, while the agent is killed and the splice switched off
//! and on. `cargo xtask torture` does the same for longer.

use std::time::Duration;

use lab::LogOutput;
use lab::random::seed;
use lab::torture::run::{Settings, run};

#[test]
fn no_connection_sees_anything_that_tcp_would_not_do() {
    let settings = Settings {
        seed: seed(),
        time: Duration::from_secs(50),
        promotions: 300,
        demotions: 100,
        limit: Duration::from_secs(600),
        parallel: 12,
        patience: Duration::from_secs(60),
        logs: LogOutput::Captured,
    };
    let outcome = run(&settings, |line| println!("{line}")).unwrap();
    println!("{outcome}");
    let torture = &outcome.torture;
    assert!(torture.faults.is_empty(), "{:#?}", torture.described);
}
