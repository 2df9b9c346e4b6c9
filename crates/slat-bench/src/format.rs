//! The list of formats of second-stage tables, by their names on the command line and in reports.
//!
//! Code that measures is compiled for each format separately. A crate that uses
//! [`on_format!`](crate::on_format) or [`on_machine!`](crate::on_machine) has the formats that its
//! tests do not need under its own feature `every-format`.

use clap::{Args, ValueEnum};
use slat::format::arm64::Arm64;
use slat::format::riscv::{Mode, RiscV};
use slat::{Format, PageSize};
use slat_lab::failure::bad_input;
use slat_lab::size::Size;
use slat_sim::Arm;

/// Smallest page of the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Granule {
    /// 4096 bytes
    #[default]
    #[value(name = "4k")]
    Size4k,
    /// 16384 bytes
    #[value(name = "16k")]
    Size16k,
    /// 65536 bytes
    #[value(name = "64k")]
    Size64k,
}

impl Granule {
    /// Returns the bytes of the smallest page.
    pub const fn bytes(self) -> u64 {
        self.leaf_sizes()[0].0
    }

    /// Returns the sizes of pages and blocks, the smallest first.
    pub const fn leaf_sizes(self) -> &'static [Size] {
        match self {
            Self::Size4k => &[Size(4 << 10), Size(2 << 20), Size(1 << 30)],
            Self::Size16k => &[Size(16 << 10), Size(32 << 20)],
            Self::Size64k => &[Size(64 << 10), Size(512 << 20)],
        }
    }
}

/// The list: each format is one row, and is named nowhere else.
///
/// A row has: the variant, its name on the command line, its description, another name; its type,
/// which knows the sizes of its leaves; the features under which a program has its tables, and the
/// tables for hardware that sets accessed and dirty marks; the features under which a program has
/// guests on them, and a function from the level of FEAT_BBM to the tables and a CPU of the
/// simulator that walks them.
#[macro_export]
#[doc(hidden)]
macro_rules! table_formats {
    ($then:ident $($arguments:tt)*) => {
        $crate::$then! {
            $($arguments)*
            {
                Arm64K4 "arm64-4k"
                ["Arm's stage 2 in pages of 4k, with blocks of 2m and 1g"] ["arm64"]
                ::slat::format::arm64::Arm64K4;
                [all()] $crate::format::arm::<12, false>();
                [all()] $crate::format::arm_guest::<12, false>
            }
            {
                Arm64K16 "arm64-16k" ["Arm's stage 2 in pages of 16k, with blocks of 32m"] []
                ::slat::format::arm64::Arm64K16;
                [any(feature = "granules", feature = "every-format")]
                $crate::format::arm::<14, false>();
                [feature = "every-format"] $crate::format::arm_guest::<14, false>
            }
            {
                Arm64K64 "arm64-64k" ["Arm's stage 2 in pages of 64k, with blocks of 512m"] []
                ::slat::format::arm64::Arm64K64;
                [any(feature = "granules", feature = "every-format")]
                $crate::format::arm::<16, false>();
                [feature = "every-format"] $crate::format::arm_guest::<16, false>
            }
            {
                Arm64Lpa2K4 "arm64-lpa2-4k"
                ["The same as arm64-4k with FEAT_LPA2: addresses of 52 bits"] []
                ::slat::format::arm64::Arm64K4;
                [feature = "every-format"] $crate::format::arm::<12, true>();
                [feature = "every-format"] $crate::format::arm_guest::<12, true>
            }
            {
                Arm64Lpa2K16 "arm64-lpa2-16k"
                ["The same as arm64-16k with FEAT_LPA2; its blocks of 64g are not used here"] []
                ::slat::format::arm64::Arm64K16;
                [feature = "every-format"] $crate::format::arm::<14, true>();
                [feature = "every-format"] $crate::format::arm_guest::<14, true>
            }
            {
                Arm64LpaK64 "arm64-lpa-64k"
                ["The same as arm64-64k with FEAT_LPA: addresses of 52 bits"] []
                ::slat::format::arm64::Arm64K64;
                [feature = "every-format"] $crate::format::arm::<16, true>();
                [feature = "every-format"] $crate::format::arm_guest::<16, true>
            }
            {
                Ept "ept"
                ["Intel's extended page tables, with accessed and dirty bits: 4k, 2m, 1g"] []
                ::slat::format::ept::Ept1G;
                [all()] ::slat::format::ept::Ept1G::default();
                [all()] $crate::format::default_guest::<::slat::format::ept::Ept1G, ::slat_sim::Ept>
            }
            {
                Npt "npt" ["AMD's nested page tables: 4k, 2m, 1g"] []
                ::slat::format::npt::Npt1G;
                [feature = "every-format"] ::slat::format::npt::Npt1G::default();
                [feature = "every-format"]
                $crate::format::default_guest::<::slat::format::npt::Npt1G, ::slat_sim::Npt>
            }
            {
                RiscV "riscv"
                ["RISC-V's G-stage, the narrowest of Sv39x4, Sv48x4, Sv57x4 that does: 4k, 2m, 1g"]
                []
                ::slat::format::riscv::RiscV;
                [feature = "every-format"] $crate::format::riscv();
                [feature = "every-format"]
                |_| ($crate::format::riscv(), ::slat_sim::RiscV::default())
            }
            {
                Power4k "power-4k"
                ["Power's radix trees, partition-scoped, in pages of 4k, with 2m and 1g"] []
                ::slat::format::power::PowerK4;
                [feature = "every-format"] ::slat::format::power::PowerK4::default();
                [feature = "every-format"]
                |_| (::slat::format::power::PowerK4::default(), ::slat_sim::Power::new(12))
            }
            {
                Power64k "power-64k" ["The same in pages of 64k, with 2m and 1g"] []
                ::slat::format::power::PowerK64;
                [feature = "every-format"] ::slat::format::power::PowerK64::default();
                [feature = "every-format"]
                |_| (::slat::format::power::PowerK64::default(), ::slat_sim::Power::new(16))
            }
        }
    };
}

/// Defines the type that names the formats.
#[macro_export]
#[doc(hidden)]
macro_rules! name_formats {
    ($({
        $variant:ident $name:literal [$about:literal] [$($alias:literal)?]
        $of:ty; $tables_if:tt $tables:expr; $guest_if:tt $guest:expr
    })*) => {
        /// A format of second-stage tables, on hardware that sets accessed and dirty marks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
        pub enum TableFormat {
            $(
                #[doc = $about]
                #[value(name = $name, $(alias = $alias,)? help = $about)]
                $variant,
            )*
        }

        impl TableFormat {
            /// Returns the sizes of its leaves, the smallest first, without those that are larger
            /// than a split's largest step.
            pub fn leaves(self) -> Vec<PageSize> {
                match self {
                    $(Self::$variant => leaves_of::<$of>(),)*
                }
            }
        }
    };
}
table_formats!(name_formats);

/// Returns Arm's stage 2 for a CPU that marks writes.
pub fn arm<const PAGE_SHIFT: u32, const WIDE: bool>() -> Arm64<PAGE_SHIFT, WIDE>
where
    Arm64<PAGE_SHIFT, WIDE>: Format,
{
    Arm64 { hardware_dirty: true, ..Arm64::default() }
}

/// Returns the same for a guest whose memory is forced to be write-back, and a CPU with a level of
/// FEAT_BBM.
pub fn arm_guest<const PAGE_SHIFT: u32, const WIDE: bool>(bbm: u8) -> (Arm64<PAGE_SHIFT, WIDE>, Arm)
where
    Arm64<PAGE_SHIFT, WIDE>: Format,
{
    let (lpa2, lpa) = (WIDE && PAGE_SHIFT < 16, WIDE && PAGE_SHIFT == 16);
    let cpu = Arm { bbm, forced_write_back: true, lpa2, lpa, ..Arm::new(PAGE_SHIFT, 40) };
    (Arm64 { forced_write_back: true, ..arm() }, cpu)
}

/// Returns tables and a CPU with their defaults.
pub fn default_guest<F: Default, A: Default>(_bbm: u8) -> (F, A) {
    Default::default()
}

/// Returns the G-stage of a CPU that has all modes.
pub fn riscv() -> RiscV {
    RiscV { widest: Mode::Sv57x4, ..RiscV::default() }
}

/// Runs `$body` with the format that `$choice` names. If this program was built without the format,
/// the function around it returns an error.
#[macro_export]
macro_rules! on_format {
    ($choice:expr, |$format:ident| $body:expr) => {
        $crate::table_formats!(run_on_format[$choice][$format][$body])
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! run_on_format {
    ([$choice:expr] [$format:ident] [$body:expr] $({
        $variant:ident $name:literal [$about:literal] [$($alias:literal)?]
        $of:ty; [$($tables_if:tt)*] $tables:expr; $guest_if:tt $guest:expr
    })*) => {
        match $choice {
            $(
                #[cfg($($tables_if)*)]
                $crate::format::TableFormat::$variant => {
                    let $format = $tables;
                    $body
                }
            )*
            #[allow(unreachable_patterns)]
            other => return Err($crate::format::not_built(other)),
        }
    };
}

/// Runs `$body` with the format that `$tables` names, and with a CPU of the simulator that walks
/// it. If this program was built without the format, the function around it returns an error.
#[macro_export]
macro_rules! on_machine {
    ($tables:expr, |$format:ident, $machine:ident| $body:expr) => {
        $crate::table_formats!(run_on_machine[$tables][$format][$machine][$body])
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! run_on_machine {
    ([$tables_args:expr] [$format:ident] [$machine:ident] [$body:expr] $({
        $variant:ident $name:literal [$about:literal] [$($alias:literal)?]
        $of:ty; $tables_if:tt $tables:expr; [$($guest_if:tt)*] $guest:expr
    })*) => {{
        let tables: &$crate::format::TablesArgs = $tables_args;
        let bbm: u8 = tables.bbm()?;
        match tables.format {
            $(
                #[cfg($($guest_if)*)]
                $crate::format::TableFormat::$variant => {
                    let ($format, $machine) = ($guest)(bbm);
                    $body
                }
            )*
            #[allow(unreachable_patterns)]
            other => return Err($crate::format::not_built(other)),
        }
    }};
}

/// Returns the error that this program has no such tables, or no guests on them.
pub fn not_built(format: TableFormat) -> anyhow::Error {
    bad_input(format!(
        "--format {format}: this program was built without it; with the feature `every-format` it \
         has all formats, and guests on those for which the simulator has a CPU"
    ))
}

impl TableFormat {
    /// Returns whether it is a format of Arm.
    pub fn is_arm(self) -> bool {
        self.to_string().starts_with("arm64")
    }

    /// Returns Arm's format with the granule.
    pub const fn of_granule(granule: Granule) -> Self {
        match granule {
            Granule::Size4k => Self::Arm64K4,
            Granule::Size16k => Self::Arm64K16,
            Granule::Size64k => Self::Arm64K64,
        }
    }

    /// Returns the granule, if Linux's own tables can have the same format.
    ///
    /// # Errors
    /// Linux has no tables of the format.
    pub fn granule(self) -> anyhow::Result<Granule> {
        let all = Granule::value_variants();
        let found = all.iter().copied().find(|granule| Self::of_granule(*granule) == self);
        found.ok_or_else(|| {
            bad_input(format!(
                "--format {self}: of Linux's tables there are arm64-4k, arm64-16k and arm64-64k"
            ))
        })
    }

    /// Returns the leaf of `size`, which `option` asked for.
    ///
    /// # Errors
    /// The format has no leaf of this size.
    pub fn leaf(self, option: &str, size: Size) -> anyhow::Result<PageSize> {
        let leaves = self.leaves();
        leaves.iter().copied().find(|leaf| leaf.bytes() == size.bytes()).ok_or_else(|| {
            let names: Vec<String> = leaves.iter().map(ToString::to_string).collect();
            bad_input(format!(
                "{option} {size}: tables of {self} have pages and blocks of {}",
                names.join(", ")
            ))
        })
    }
}

/// Largest leaf that is used. The memory of guests is a multiple of it, and tables are built in
/// steps of it.
pub const LARGEST: PageSize = PageSize::SIZE_1G;

fn leaves_of<F: Format>() -> Vec<PageSize> {
    (0..=F::LARGEST_LEAF).map(F::size).filter(|size| *size <= LARGEST).collect()
}

/// Options of the guest's tables.
#[derive(Clone, Copy, Debug, Args)]
pub struct TablesArgs {
    /// Format of the guest's tables
    #[arg(long, value_name = "FORMAT", default_value = "ept")]
    pub format: TableFormat,

    /// Level of FEAT_BBM: the changes of size of a live entry that an Arm CPU allows [default: 0]
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub bbm: Option<u8>,
}

impl TablesArgs {
    /// Returns options with a format and the default CPU.
    pub const fn of(format: TableFormat) -> Self {
        Self { format, bbm: None }
    }

    /// Returns the level of FEAT_BBM.
    ///
    /// # Errors
    /// The level was given, and the format has none.
    pub fn bbm(&self) -> anyhow::Result<u8> {
        match self.bbm {
            Some(bbm) if !self.format.is_arm() => Err(bad_input(format!(
                "--bbm {bbm} is of Arm CPUs; take --format arm64 with it, or leave it out"
            ))),
            bbm => Ok(bbm.unwrap_or(0)),
        }
    }
}

slat_lab::display_as_written!(Granule, TableFormat);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_its_own_name_and_old_names_still_work() {
        let named = |name: &str| TableFormat::from_str(name, false);
        for format in TableFormat::value_variants() {
            assert_eq!(named(&format.to_string()), Ok(*format));
        }
        assert_eq!(named("arm64"), Ok(TableFormat::Arm64K4));
        assert_eq!(named("arm64-16k"), Ok(TableFormat::Arm64K16));
        assert!(named("power").is_err());
    }

    #[test]
    fn a_refused_leaf_size_is_answered_with_the_formats_sizes() {
        let size = |format: TableFormat, bytes| format.leaf("--backing", Size(bytes));
        assert_eq!(size(TableFormat::RiscV, 1 << 30).unwrap(), PageSize::SIZE_1G);
        let error = size(TableFormat::Arm64K16, 2 << 20).unwrap_err().to_string();
        assert!(error.contains("--backing 2m") && error.contains("16k, 32m"), "{error}");
        // Blocks of 64g are larger than a step.
        assert_eq!(TableFormat::Arm64Lpa2K16.leaves(), TableFormat::Arm64K16.leaves());
    }

    #[test]
    fn a_level_of_bbm_is_arms_alone() {
        for &format in TableFormat::value_variants() {
            let bbm = TablesArgs { format, bbm: Some(2) }.bbm();
            assert_eq!(bbm.is_ok(), format.is_arm(), "{format}");
        }
    }
}
