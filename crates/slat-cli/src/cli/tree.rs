//! Trees of the kernel on command lines: their edits, their patches, and how they are built.

use clap::Args;
use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Patches as they are.
#[derive(Clone, Debug, Default, Args)]
pub struct PatchesArgs {
    /// Patches, after the edits: a diff, a file of `git format-patch`, a folder of them, an mbox
    /// with its cover letter and replies; `-` reads standard input; may be given repeatedly
    #[arg(long = "patch", value_name = "FILE|DIR|-")]
    pub paths: Vec<PathBuf>,

    /// Commits of the tree, which is a git repository: A is the tree, and the commits after it up
    /// to B are its patches
    #[arg(long, value_name = "A..B")]
    pub range: Option<String>,
}

impl PatchesArgs {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty() && self.range.is_none()
    }
}

/// The folder of edits.
#[derive(Clone, Debug, Default, Args)]
pub struct EditsArgs {
    /// Folder of series of edits [default: Slat's own]
    #[arg(long, value_name = "DIR")]
    pub edits: Option<PathBuf>,
}

/// How a tree is built.
#[derive(Clone, Debug, Default, Args)]
pub struct ConfigArgs {
    /// More options for the kernel's configuration: checked (lockdep, KASAN and their like), kcsan,
    /// private (guest_memfd, x86), 16k, 64k (pages of arm64), or a file with CONFIG_NAME=y a line;
    /// each has objects of its own
    #[arg(long, value_name = "NAME|FILE")]
    pub config: Option<PathBuf>,
}

/// A source tree and the edits to make to it.
#[derive(Clone, Debug, Args)]
pub struct TreeArgs {
    /// The source tree: a path; a git repository and a revision, ~/linux@v6.12; or debian-6.1,
    /// debian-6.12, debian-7.3, which are fetched once
    #[arg(long, value_name = "TREE")]
    pub tree: String,

    /// Edits, in this order: SERIES, or SERIES/N for its first N [default: none]
    #[arg(long = "edit", short, value_name = "SERIES,...", value_delimiter = ',')]
    pub names: Vec<String>,

    /// Patches as they are.
    #[command(flatten)]
    pub patches: PatchesArgs,

    /// The folder of edits.
    #[command(flatten)]
    pub edits: EditsArgs,

    /// How the tree is built.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// A tree with edits, written as one word: `TREE`, or `TREE+SERIES,SERIES`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeChoice {
    /// A path, or the name of a Debian source package's tree, such as `debian-6.12`.
    pub tree: String,
    /// Names of the edits, in the order in which they are made.
    pub edits: Vec<String>,
}

impl FromStr for TreeChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        // A path may contain a plus sign: where the whole text is a folder, it has no edits.
        let whole = std::path::Path::new(text).is_dir();
        let (tree, edits) = text.rsplit_once('+').filter(|_| !whole).unwrap_or((text, ""));
        let edits = edits.split(',').filter(|name| !name.is_empty()).map(str::to_owned);
        Ok(Self { tree: tree.to_owned(), edits: edits.collect() })
    }
}

impl fmt::Display for TreeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tree, edits } = self;
        f.write_str(tree)?;
        if edits.is_empty() { Ok(()) } else { write!(f, "+{}", edits.join(",")) }
    }
}

impl TreeArgs {
    /// Returns the names of the edits and of the files of patches.
    pub fn named(&self) -> Vec<String> {
        let patches = self.patches.paths.iter().map(|path| path.display().to_string());
        self.names.iter().chain(&self.patches.range).cloned().chain(patches).collect()
    }
}

impl From<&TreeArgs> for TreeChoice {
    fn from(args: &TreeArgs) -> Self {
        Self { tree: args.tree.clone(), edits: args.names.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_and_its_edits_are_one_word() {
        for text in ["debian-6.12", "/a/linux+walks", "/a/linux+walks/2,flush"] {
            assert_eq!(text.parse::<TreeChoice>().unwrap().to_string(), text);
        }
        let choice: TreeChoice = "../linux+walks/2,flush".parse().unwrap();
        assert_eq!((&*choice.tree, choice.edits.len()), ("../linux", 2));
        let folder = tempfile::Builder::new().prefix("a+b").tempdir().unwrap();
        let choice: TreeChoice = folder.path().to_str().unwrap().parse().unwrap();
        assert!(choice.edits.is_empty());
    }
}
