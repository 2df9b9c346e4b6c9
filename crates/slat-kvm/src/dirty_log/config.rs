//! What to run.

use super::Mode;
use crate::guest::{check_share, check_vcpus};
use crate::write_pass::WritePass;
use crate::{Backing, Error, HostKvm};

/// What to run. [`Default`] is a short run that any host can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Bytes of memory of the whole guest.
    pub memory: u64,
    /// vCPUs, which share the memory evenly.
    pub vcpus: usize,
    /// Rounds of dirty, get, clear.
    pub iterations: u32,
    /// The host's pages behind the memory.
    pub backing: Backing,
    /// Who clears the log, and what it starts with.
    pub mode: Mode,
    /// Pages of one `KVM_CLEAR_DIRTY_LOG`: a multiple of 64, or none for the whole slot.
    pub clear_chunk: Option<u64>,
    /// Per cent of its pages that a vCPU writes in a round, evenly spread; others in each round.
    pub write_share: u8,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory: 64 << 20,
            vcpus: 1,
            iterations: 2,
            backing: Backing::Small,
            mode: Mode::Manual,
            clear_chunk: None,
            write_share: 100,
        }
    }
}

impl Config {
    /// Checks what can be checked without a guest: the values by themselves, the capabilities of
    /// `host`, and the memory of the machine as it is now.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::MissingCapability`], or what [`Backing::check`] finds.
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        check_vcpus(self.vcpus, host.max_vcpus)?;
        check_share(self.memory, self.backing, self.vcpus)?;
        WritePass::new(0, self.write_share)?;
        if self.iterations == 0 {
            return Err(Error::invalid("iterations", 0, "must be at least 1"));
        }
        if let Some(chunk) = self.clear_chunk {
            self.check_chunk(chunk)?;
        }
        self.mode.check(host)?;
        self.backing.check(self.memory)
    }

    fn check_chunk(&self, chunk: u64) -> Result<(), Error> {
        let invalid = |rule| Err(Error::invalid("clear chunk", chunk, rule));
        if !self.mode.is_manual() {
            return invalid("needs manual protect: without it, the log is cleared by the get");
        }
        if chunk == 0 || !chunk.is_multiple_of(64) {
            return invalid("must be a multiple of 64 pages (KVM_CLEAR_DIRTY_LOG), and not 0");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostKvm {
        HostKvm {
            api_version: 12,
            module: "kvm".into(),
            max_vcpus: 4,
            max_memslots: 8,
            manual_protect: true,
            initially_set: false,
            dirty_ring_bytes: 0,
            binary_stats: true,
            parameters: Default::default(),
        }
    }

    fn message(config: Config) -> String {
        config.check(&host()).expect_err("refused").to_string()
    }

    #[test]
    fn the_default_can_be_run() {
        Config::default().check(&host()).unwrap();
    }

    #[test]
    fn a_chunk_is_a_multiple_of_64_and_needs_manual_protect() {
        for chunk in [0, 1, 63, 65] {
            let config = Config { clear_chunk: Some(chunk), ..Config::default() };
            assert!(message(config).contains("multiple of 64"));
        }
        let legacy = Config { clear_chunk: Some(64), mode: Mode::Legacy, ..Config::default() };
        assert!(message(legacy).contains("needs manual protect"));
        let good = Config { clear_chunk: Some(64), ..Config::default() };
        good.check(&host()).unwrap();
    }

    #[test]
    fn what_the_host_cannot_do_is_refused() {
        let full = Config { mode: Mode::ManualInitiallySet, ..Config::default() };
        assert!(message(full.clone()).contains("KVM_DIRTY_LOG_INITIALLY_SET"));
        let old = HostKvm { manual_protect: false, ..host() };
        let error = Config::default().check(&old).unwrap_err();
        assert!(error.to_string().contains("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2"));
        assert!(message(Config { vcpus: 5, ..Config::default() }).contains("1 to 4"));
    }

    #[test]
    fn values_that_measure_nothing_are_refused() {
        assert!(message(Config { iterations: 0, ..Config::default() }).contains("at least 1"));
        assert!(message(Config { write_share: 0, ..Config::default() }).contains("1 to 100"));
        assert!(message(Config { memory: 4095, ..Config::default() }).contains("multiple"));
    }

    #[test]
    fn more_memory_than_the_machine_has_is_refused() {
        let config = Config { memory: 1 << 42, ..Config::default() };
        assert!(matches!(config.check(&host()), Err(Error::NotEnoughMemory { .. })));
    }
}
