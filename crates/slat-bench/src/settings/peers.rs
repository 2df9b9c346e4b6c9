//! Options of the comparison with Linux and crates.

use crate::format::Granule;
use clap::{Args, ValueEnum};
use slat_lab::cli::{Switch, count};
use slat_lab::failure::bad_input;
use slat_lab::size::Size;
use std::path::PathBuf;
use std::str::FromStr;

/// Options of Linux trees, and of their walks.
#[derive(Clone, Debug, Default, Args)]
pub struct TreesArgs {
    /// A Linux source tree, 6.6 to 7.x; repeat it for several, each with a name if you like
    #[arg(long, value_name = "[NAME=]PATH")]
    pub linux_tree: Vec<NamedTree>,

    /// Edits to a copy of the first tree, which is measured too; repeat it for several sets of
    /// edits
    ///
    /// bounded-walks/2: a split does not visit entries of the last level. bounded-walks: nor those
    /// of tables that it just built. Edits need Coccinelle (spatch); `slat kernel list` lists them.
    #[arg(long, value_name = "EDIT[,EDIT]")]
    pub with: Vec<EditSet>,

    /// Folder of edits, each NAME.cocci or a folder with a series [default: Slat's own]
    #[arg(long, value_name = "DIR")]
    pub edits: Option<PathBuf>,

    /// Kind of Linux's walks of live tables: exclusive, by plain stores; or as if shared, by
    /// compare-and-swap
    ///
    /// Linux itself shares tables only in faults, and does the rest alone, under a lock. Shared
    /// walks show the cost without that lock, which the engine never has.
    #[arg(
        long,
        value_name = "KIND,...",
        value_delimiter = ',',
        default_value = "exclusive,shared"
    )]
    pub walks: Vec<WalkKind>,

    /// Whether stage 2 forces the memory type (FEAT_S2FWB); if not, Linux maintains caches as it
    /// maps
    #[arg(long, value_name = "on|off", default_value_t)]
    pub fwb: Switch,
}

/// Options of the comparison with Linux: its tables, and how they are built and walked.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Linux's own tables")]
pub struct LinuxArgs {
    /// The tables to measure: the engine's, or also those of Linux's own code, compiled from a tree
    #[arg(long, value_name = "TARGET", default_value_t)]
    pub target: TablesTarget,

    /// Its trees.
    #[command(flatten)]
    pub trees: TreesArgs,

    /// Bytes that Linux splits at a time (KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE) [default: the largest
    /// block]
    #[arg(long, value_name = "SIZE")]
    pub chunk_size: Option<Size>,

    /// Whether the tables are in the CPU's caches before each operation, as far as they fit
    #[arg(long, value_name = "warm|cold", default_value_t)]
    pub caches: Caches,
}

impl LinuxArgs {
    /// Refuses options that would be ignored.
    ///
    /// # Errors
    /// The options do not ask for Linux's tables, and say something about them.
    pub fn check(&self) -> anyhow::Result<()> {
        let Self { target, trees, chunk_size, caches } = self;
        let about = !trees.linux_tree.is_empty()
            || !trees.with.is_empty()
            || trees.edits.is_some()
            || chunk_size.is_some()
            || *caches != Caches::Warm
            || trees.fwb != Switch::On;
        match (target, about) {
            (TablesTarget::Engine, true) => {
                Err(bad_input("options about Linux's own tables need --target linux-source"))
            }
            _ => Ok(()),
        }
    }
}

/// The tables to measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TablesTarget {
    /// The engine's
    #[default]
    Engine,
    /// The engine's and Linux's
    LinuxSource,
}

/// A tree, and its name in results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTree {
    /// The name, if one was given.
    pub name: Option<String>,
    /// Path of the tree.
    pub path: PathBuf,
}

impl FromStr for NamedTree {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = match text.split_once('=') {
            // A path may contain `=`, too.
            Some((name, path)) if !name.contains('/') => (Some(name.to_owned()), path),
            _ => (None, text),
        };
        if path.is_empty() || name.as_deref() == Some("") {
            return Err("write it as PATH or NAME=PATH".to_owned());
        }
        Ok(Self { name, path: path.into() })
    }
}

/// Edits that are applied together, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EditSet(pub Vec<String>);

impl FromStr for EditSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        match names.iter().any(String::is_empty) {
            true => Err("write it as EDIT or EDIT,EDIT".to_owned()),
            false => Ok(Self(names)),
        }
    }
}

/// Kind of Linux's walks of live tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WalkKind {
    /// Alone, under its lock: plain stores
    Exclusive,
    /// As if shared with other walks: compare-and-swap (KVM_PGTABLE_WALK_SHARED)
    Shared,
}

/// Place of the tables when an operation begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Caches {
    /// In the caches, as far as they fit
    #[default]
    Warm,
    /// In memory only
    Cold,
}

/// Options of the comparison with Linux, crates and limits, in one run.
#[derive(Clone, Debug, Args)]
pub struct PeersArgs {
    /// Memory of the guest; most operations take an eighth of it [default: 64G]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Samples of each entrant, taken in turns [default: 7]
    #[arg(long, value_name = "N", value_parser = count::rounds())]
    pub rounds: Option<u32>,

    /// 1 GiB and three rounds unless other options set them: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Linux's tables.
    #[command(flatten)]
    pub linux: LinuxArgs,
}

/// Examples of command lines of the check.
pub const CHECK_EXAMPLES: &str = "\
Examples:
  slat-bench check --linux-tree linux-6.12
      random histories through Linux's tables and the engine's: the same translation everywhere
  slat-bench check --linux-tree patched=~/linux --histories 2000 --granule 16k
  slat-bench check --linux-tree linux-6.12 --with bounded-walks/2 --seed 7";

/// Options of random histories of operations through Linux's tables and the engine's.
#[derive(Clone, Debug, Args)]
pub struct CheckArgs {
    /// Histories of each kind of walk, for each tree
    #[arg(long, value_name = "N", default_value_t = 200)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub histories: u32,

    /// Operations of a history
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = count::iterations())]
    pub length: u32,

    /// Seed of the random numbers; the same one gives the same histories
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Smallest page of the tables
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    pub granule: Granule,

    /// Linux's trees.
    #[command(flatten)]
    pub trees: TreesArgs,
}

/// Examples of command lines of the comparison.
pub const EXAMPLES: &str = "\
Examples:
  slat-bench peers --linux-tree linux-6.12 --with bounded-walks/2
      the engine, Linux's own code with and without an edit, other crates, the machine's limits
  slat-bench peers --quick";

slat_lab::display_as_written!(TablesTarget, WalkKind, Caches);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_a_name_only_if_one_is_given() {
        let tree = |text: &str| text.parse::<NamedTree>().map(|tree| (tree.name, tree.path));
        assert_eq!(tree("a/b").unwrap(), (None, "a/b".into()));
        assert_eq!(tree("new=/a=b").unwrap(), (Some("new".to_owned()), "/a=b".into()));
        assert_eq!(tree("/a=b").unwrap(), (None, "/a=b".into()));
        assert!(tree("=x").is_err() && tree("x=").is_err());
        assert!("a,,b".parse::<EditSet>().is_err());
        assert_eq!("a, b".parse::<EditSet>().unwrap().0, ["a", "b"]);
    }
}
