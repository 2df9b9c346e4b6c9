//! Builds of the hypervisor: one for each form of stage 2, because nearly all of it is compiled for
//! the form.

use crate::workspace::{cargo, ran};
use crate::{setup, target};
use anyhow::{Context, bail};
use clap::ValueEnum;
use slat_kernel::vm::qemu::AARCH64;
use std::fmt;
use std::fs;
use std::path::PathBuf;

/// The target of the hypervisor: without FP, so that the guest's registers keep their values.
const TARGET: &str = "aarch64-unknown-none-softfloat";

/// Name of the program in cargo, for all features.
const PROGRAM: &str = "slat-hypervisor";

/// Smallest page of stage 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Granule {
    /// 4 KiB
    #[default]
    #[value(name = "4k")]
    K4,
    /// 16 KiB
    #[value(name = "16k")]
    K16,
    /// 64 KiB
    #[value(name = "64k")]
    K64,
}

impl fmt::Display for Granule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::K4 => "4k",
            Self::K16 => "16k",
            Self::K64 => "64k",
        })
    }
}

/// A form of stage 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Build {
    granule: Granule,
    lpa2: bool,
}

impl Build {
    /// # Errors
    /// The granule has no FEAT_LPA2.
    pub fn new(granule: Granule, lpa2: bool) -> anyhow::Result<Self> {
        if lpa2 && granule == Granule::K64 {
            bail!("--lpa2 is of granules of 4k and 16k; leave one of --lpa2 and --granule 64k out");
        }
        Ok(Self { granule, lpa2 })
    }

    /// Returns the sizes of its leaves.
    const fn leaves(self) -> &'static [&'static str] {
        match (self.granule, self.lpa2) {
            (Granule::K4, _) => &["4k", "2m", "1g"],
            (Granule::K16, false) => &["16k", "32m"],
            (Granule::K16, true) => &["16k", "32m", "64g"],
            (Granule::K64, _) => &["64k", "512m"],
        }
    }

    /// Returns the largest leaf, as asked for, or else the smallest block.
    ///
    /// # Errors
    /// The form has no leaf of this size.
    pub fn largest(self, asked: Option<&str>) -> anyhow::Result<&str> {
        let leaves = self.leaves();
        match asked {
            None => Ok(leaves[1]),
            Some(size) if leaves.contains(&size) => Ok(size),
            Some(size) => bail!(
                "--largest {size}: a granule of {} has leaves of {}",
                self.granule,
                leaves.join(", ")
            ),
        }
    }

    /// Returns the number of bits of guest addresses; 0 for all that the CPU has. With 52 bits a
    /// walk of 16K begins at the manual's level 0, which QEMU 7.2 refuses for that granule
    /// (`check_s2_mmu_setup`).
    pub const fn bits(self) -> u8 {
        match (self.granule, self.lpa2) {
            (Granule::K16, true) => 51,
            _ => 0,
        }
    }

    fn features(self) -> Vec<&'static str> {
        let granule = match self.granule {
            Granule::K4 => None,
            Granule::K16 => Some("granule-16k"),
            Granule::K64 => Some("granule-64k"),
        };
        self.lpa2.then_some("lpa2").into_iter().chain(granule).collect()
    }

    /// Installs the emulator and the target, and builds the hypervisor; the one without features
    /// together with its probe.
    ///
    /// # Errors
    /// Something cannot be installed or built.
    pub fn prepare(self) -> anyhow::Result<()> {
        setup::emulator(AARCH64)?;
        setup::target(TARGET)?;
        let features = self.features().join(",");
        let mut build = cargo(&["build", "--quiet", "--package", "slat-hypervisor"]);
        build.args(["--target", TARGET]);
        match features.as_str() {
            "" => build.arg("--bins"),
            features => build.args(["--bin", PROGRAM, "--features", features]),
        };
        ran(&mut build)?;
        // The next build may have other features, and cargo uses the same name for all.
        fs::copy(program(PROGRAM), self.program()).context("cannot keep the hypervisor")?;
        Ok(())
    }

    /// Returns the path of the program.
    pub fn program(self) -> PathBuf {
        let mut words = vec![PROGRAM, "kept"];
        words.extend(self.features());
        program(&words.join("-"))
    }
}

/// Returns the path of a program of the hypervisor's package.
pub fn program(name: &str) -> PathBuf {
    target().join(TARGET).join("debug").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_has_a_program_of_its_own() {
        let name = |granule, lpa2| {
            let build = Build::new(granule, lpa2).unwrap();
            build.program().file_name().unwrap().to_string_lossy().into_owned()
        };
        assert_eq!(name(Granule::K4, false), "slat-hypervisor-kept");
        assert_eq!(name(Granule::K4, true), "slat-hypervisor-kept-lpa2");
        assert_eq!(name(Granule::K16, true), "slat-hypervisor-kept-lpa2-granule-16k");
        assert_eq!(name(Granule::K64, false), "slat-hypervisor-kept-granule-64k");
    }

    #[test]
    fn what_a_granule_lacks_is_refused_with_what_it_has() {
        let refused = Build::new(Granule::K64, true).unwrap_err().to_string();
        assert!(refused.contains("4k and 16k"), "{refused}");
        let large = Build::new(Granule::K16, false).unwrap();
        let refused = large.largest(Some("2m")).unwrap_err().to_string();
        assert!(refused.contains("--largest 2m") && refused.contains("16k, 32m"), "{refused}");
        assert_eq!(large.largest(None).unwrap(), "32m");
    }
}
