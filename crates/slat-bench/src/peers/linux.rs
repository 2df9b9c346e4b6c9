//! Linux's side of an operation: trees, their programs, and the results.

use super::known::SLAT;
use super::leaves::{self, ALLOWED};
use super::ours::{Left, Turns};
use super::work::{Op, Setting, Work};
use crate::arena::Arena;
use crate::contest::Sample;
use crate::fixture::Fixture;
use crate::linux::{Answer, Build, Edits, Error, Helper, Op as Call, Prot, Tree, Workshop};
use crate::settings::peers::{Caches, TreesArgs, WalkKind};
use anyhow::{Context, ensure};
use slat::{Format, GpaRange};
use slat_lab::failure::Failure;
use slat_lab::session::Session;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Number of bits of guest addresses, as in the engine's fixtures.
const ADDRESS_BITS: u32 = 40;

/// Names that results use for others.
const RESERVED: [&str; 8] =
    [SLAT, "machine", "fill-plain", "fill-best", "read", "read-upper", "cas", "none"];

/// The trees of a run, and their programs.
pub struct Trees {
    workshop: Workshop,
    trees: Vec<Tree>,
    /// Whether a tree is an edited copy of the first.
    edited: Vec<bool>,
    running: HashMap<(usize, Build), Helper>,
    table_bytes: u64,
    stop: Arc<AtomicBool>,
}

impl Trees {
    /// Reads the trees, applies the edits, and compiles each once. It leaves out trees that cannot
    /// be used, and reports the reason to the session.
    ///
    /// # Errors
    /// Ctrl-C, or no folder for builds.
    pub fn open(
        args: &TreesArgs,
        builds: &[Build],
        table_bytes: u64,
        session: &mut Session,
    ) -> anyhow::Result<Self> {
        let workshop = Workshop::new()?;
        let stop = session.stop_flag();
        let mut opened = Self {
            workshop,
            trees: Vec::new(),
            edited: Vec::new(),
            running: HashMap::new(),
            table_bytes,
            stop,
        };
        for named in &args.linux_tree {
            let name = named.name.as_deref();
            let tree = Tree::open(name, &named.path);
            opened.take(
                tree,
                name.map_or_else(|| named.path.display().to_string(), str::to_owned),
                false,
                builds,
                session,
            )?;
        }
        for set in &args.with {
            let Some(first) = opened.trees.first() else { break };
            let edits = Edits::read(args.edits.as_deref()).map_err(Error::from);
            let edited = edits.and_then(|edits| first.with(&edits, &set.0));
            opened.take(edited, format!("--with {}", set.0.join(",")), true, builds, session)?;
        }
        Ok(opened)
    }

    fn take(
        &mut self,
        tree: Result<Tree, Error>,
        what: String,
        edited: bool,
        builds: &[Build],
        session: &mut Session,
    ) -> anyhow::Result<()> {
        let compiled = tree.and_then(|mut tree| {
            let taken =
                |name: &str| name.is_empty() || RESERVED.contains(&name) || name.contains(", ");
            // Otherwise two trees of one version would share a row.
            while taken(&tree.name) || self.trees.iter().any(|other| other.name == tree.name) {
                tree.name.push('\'');
            }
            for &build in builds {
                self.workshop.build(&tree, build)?;
            }
            Ok(tree)
        });
        match compiled {
            Ok(tree) => {
                self.trees.push(tree);
                self.edited.push(edited);
            }
            Err(error) => session.skip(what, error.to_string()),
        }
        Ok(session.check()?)
    }

    /// Returns the number of trees.
    pub fn len(&self) -> usize {
        self.trees.len()
    }

    /// Returns a tree's name in results.
    pub fn name(&self, tree: usize) -> &str {
        &self.trees[tree].name
    }

    /// Returns a tree's version.
    pub fn version(&self, tree: usize) -> String {
        self.trees[tree].version.to_string()
    }

    /// Returns whether a tree is an edited copy.
    pub fn is_edited(&self, tree: usize) -> bool {
        self.edited[tree]
    }

    /// Starts a program of each tree, so that all ask for huge pages at about the same time.
    pub fn start(&mut self, builds: &[Build]) -> anyhow::Result<()> {
        for tree in 0..self.len() {
            for &build in builds {
                self.helper(tree, build)?;
            }
        }
        Ok(())
    }

    /// Returns the compiler's description of itself.
    pub fn compiler(&self) -> &str {
        self.workshop.compiler()
    }

    /// Ends a program. One that failed may answer late, and to an earlier question.
    pub fn end(&mut self, tree: usize, build: Build) {
        self.running.remove(&(tree, build));
    }

    /// Returns the running program of a tree; starts it if necessary.
    pub fn helper(&mut self, tree: usize, build: Build) -> anyhow::Result<&mut Helper> {
        use std::collections::hash_map::Entry;
        Ok(match self.running.entry((tree, build)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let tree = &self.trees[tree];
                let program = self.workshop.build(tree, build)?;
                let helper =
                    Helper::start(&tree.name, &program, self.table_bytes, self.stop.clone());
                entry.insert(helper.map_err(interrupted)?)
            }
        })
    }
}

/// Converts an error; Ctrl-C becomes the lab's.
pub fn interrupted(error: Error) -> anyhow::Error {
    match error {
        Error::Interrupted => Failure::Interrupted.into(),
        error => error.into(),
    }
}

/// Returns the build for a kind of walk.
pub fn build(page_shift: u32, fwb: bool, kind: WalkKind, count: bool) -> Build {
    let shared = kind == WalkKind::Shared;
    Build { page_shift, address_bits: ADDRESS_BITS, fwb, shared, count }
}

/// Linux's turns at one work.
pub struct LinuxTurns {
    pub trees: Rc<RefCell<Trees>>,
    pub tree: usize,
    pub kind: WalkKind,
    pub work: Work,
    pub setting: Setting,
    pub range: GpaRange,
    pub host: u64,
    pub left: Left,
    pub addresses: Vec<u64>,
    pub sum: u64,
}

impl LinuxTurns {
    /// Returns the turns of a tree at the same work as those of the engine.
    pub fn beside<F: Format>(
        turns: &Turns<F>,
        trees: &Rc<RefCell<Trees>>,
        tree: usize,
        kind: WalkKind,
    ) -> Self {
        let range = turns.fixture.range();
        let addresses = turns.addresses();
        Self {
            trees: trees.clone(),
            tree,
            kind,
            work: turns.work,
            setting: turns.setting,
            range,
            host: Fixture::<F>::host(&range).0,
            left: turns.left.clone(),
            sum: turns.fixture.sum(&addresses),
            addresses,
        }
    }

    /// Returns a turn.
    pub fn turn(self) -> impl FnMut(&mut Arena, bool) -> anyhow::Result<Sample> {
        let mut counts = Vec::new();
        move |_, check| {
            if check {
                counts = self.counted()?;
            }
            let result = self.with(false, |turns, helper, name| {
                let answer = turns.once(helper)?;
                let counts = if check { turns.compared(helper, name)? } else { Vec::new() };
                Ok((answer, counts))
            });
            let (answer, compared) = result?;
            counts.extend(compared);
            Ok(Sample { seconds: answer.seconds, counts: counts.clone() })
        }
    }

    /// Calls `what` with the program that counts, or with the one that does not. Any error ends the
    /// program.
    fn with<T>(
        &self,
        count: bool,
        what: impl FnOnce(&Self, &mut Helper, &str) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let page_shift = self.work.page.bytes().trailing_zeros();
        let build = build(page_shift, self.work.fwb(&self.setting), self.kind, count);
        let mut trees = self.trees.borrow_mut();
        let name = trees.name(self.tree).to_owned();
        let result = what(self, trees.helper(self.tree, build)?, &name);
        // The counting program is needed once only.
        if count || result.is_err() {
            trees.end(self.tree, build);
        }
        result
    }

    fn counted(&self) -> anyhow::Result<Vec<(&'static str, u64)>> {
        self.with(true, |turns, helper, _| Ok(known(&turns.once(helper)?)))
    }

    /// Compares the leaves that Linux left behind with the engine's.
    fn compared(
        &self,
        helper: &mut Helper,
        name: &str,
    ) -> anyhow::Result<Vec<(&'static str, u64)>> {
        let leaves = helper.leaves(self.range.start().0, self.range.size()).map_err(interrupted)?;
        let compared = leaves::compare(&self.left.borrow(), &leaves, self.work.op, name)
            .context("the leaves of the engine and of Linux differ")?;
        let mut counts = vec![("leaves_compared", compared.leaves)];
        let differing = ALLOWED.iter().zip(compared.differing).filter(|(_, seen)| *seen > 0);
        counts.extend(differing.map(|(allowed, seen)| (allowed.known.name, seen)));
        counts.push(("table_memory_in_huge_pages", helper.huge_bytes()));
        Ok(counts)
    }

    fn once(&self, helper: &mut Helper) -> anyhow::Result<Answer> {
        let Work { op, leaf, page, .. } = self.work;
        let (start, size, host) = (self.range.start().0, self.range.size(), self.host);
        let mut call = |what| helper.call(what).map_err(interrupted);
        let map = |leaf: slat::PageSize| (start, size, host, leaf.bytes(), Prot::RAM);
        call(Call::Reset)?;
        if !matches!(op, Op::Map | Op::BuildInactive) {
            let (start, size, host, leaf, prot) = map(leaf);
            call(Call::Build { start, size, host, leaf, prot })?;
        }
        match op {
            Op::ProtectAgain | Op::Relax => {
                call(Call::Protect { start, size })?;
            }
            Op::AgeOld => {
                call(Call::Age { start, size, each: false })?;
            }
            _ => {}
        }
        if op == Op::Lookup {
            helper.addresses(&self.addresses).map_err(interrupted)?;
        }
        let mut call = |what| helper.call(what).map_err(interrupted);
        let bytes = self.work.table_bytes();
        call(match self.setting.caches {
            Caches::Warm => Call::Warm { bytes },
            Caches::Cold => Call::Cool { bytes },
        })?;
        let chunk = self.setting.chunk;
        let mut before = Answer::default();
        let what = match op {
            Op::Map => {
                let (start, size, host, leaf, prot) = map(page);
                Call::Map { start, size, host, leaf, prot }
            }
            Op::BuildInactive => {
                let (start, size, host, leaf, prot) = map(leaf);
                Call::Build { start, size, host, leaf, prot }
            }
            Op::Unmap => Call::Unmap { start, size },
            Op::Split => Call::Split { start, size, chunk },
            Op::Enable => {
                before = call(Call::Protect { start, size })?;
                Call::Split { start, size, chunk }
            }
            Op::Protect | Op::ProtectAgain | Op::ProtectInactive => Call::Protect { start, size },
            Op::Clear(word) => Call::Clear { start, size, word, chunk: 0 },
            Op::ClearSplit => Call::Clear { start, size, word: u64::MAX, chunk },
            Op::AgeYoung | Op::AgeOld => Call::Age { start, size, each: false },
            Op::AgeEach => Call::Age { start, size, each: true },
            Op::Relax => Call::Relax { start, size, prot: Prot::RAM },
            Op::Flush => Call::Flush { start, size },
            Op::Lookup => Call::Lookup,
        };
        let mut answer = call(what)?;
        ensure!(op != Op::Lookup || answer.found == self.sum, "Linux found other addresses");
        ensure!(answer.seconds > 0.0, "Linux took no time at all: nothing was measured");
        answer.seconds += before.seconds;
        for ((_, count), (_, more)) in answer.counts.iter_mut().zip(&before.counts) {
            *count += more;
        }
        Ok(answer)
    }
}

/// Returns the counts, by fixed names.
fn known(answer: &Answer) -> Vec<(&'static str, u64)> {
    const NAMES: [&str; 7] =
        ["visits", "callbacks", "tlbis", "barriers", "pages", "cache_calls", "cache_bytes"];
    let name = |known: &str| NAMES.iter().find(|name| **name == known).copied();
    answer.counts.iter().filter_map(|(found, count)| Some((name(found)?, *count))).collect()
}
