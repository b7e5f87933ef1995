//! Runs the program `manage`.

use std::io;
use std::os::fd::AsFd as _;

use aya::programs::ProgramFd;
use shunt_common::{HEADER_BYTES, MAX_TASKS, Task};

use super::sys;

/// Does things with pairs, in the kernel.
#[derive(Debug)]
pub struct Manage {
    program: ProgramFd,
}

impl Manage {
    pub(super) fn new(program: ProgramFd) -> Self {
        Self { program }
    }

    /// Does all of the tasks, and puts into each what came of it.
    ///
    /// # Errors
    ///
    /// The errno of `BPF_PROG_TEST_RUN`; tasks of earlier batches are done.
    pub fn run(&self, tasks: &mut [Task]) -> io::Result<()> {
        for batch in tasks.chunks_mut(MAX_TASKS) {
            self.run_batch(batch)?;
        }
        Ok(())
    }

    fn run_batch(&self, batch: &mut [Task]) -> io::Result<()> {
        let mut packet = [0_u8; HEADER_BYTES + MAX_TASKS * size_of::<Task>()];
        let length = HEADER_BYTES + size_of_val(batch);
        for (bytes, task) in packet[HEADER_BYTES..]
            .chunks_exact_mut(size_of::<Task>())
            .zip(&*batch)
        {
            bytes.copy_from_slice(task.as_bytes());
        }
        let repeat = u32::try_from(batch.len()).map_err(io::Error::other)?;
        sys::test_run(self.program.as_fd(), &mut packet[..length], repeat)?;
        for (bytes, task) in packet[HEADER_BYTES..]
            .chunks_exact(size_of::<Task>())
            .zip(batch)
        {
            *task = Task::from_bytes(bytes).ok_or_else(|| io::Error::other("a cut-off answer"))?;
        }
        Ok(())
    }
}
