//! Linux's side of an operation: trees, their programs, and what comes of them.

use super::leaves::{self, ALLOWED};
use super::ours::{Left, Turns};
use super::work::{Op, Setting, Work};
use crate::arena::Arena;
use crate::cli::{Caches, LinuxArgs, WalkKind};
use crate::failure::Failure;
use crate::scenario::contest::Sample;
use crate::scenario::engine::bed::Bed;
use crate::session::Session;
use anyhow::{Context, ensure};
use slat::{Format, GpaRange};
use slat_linux::{Answer, Build, Edits, Error, Helper, Op as Call, Prot, Tree, Workshop};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Bits of guest addresses, as in the engine's beds.
const ADDRESS_BITS: u32 = 40;

/// The trees of a run, and their programs.
pub struct Trees {
    workshop: Workshop,
    trees: Vec<Tree>,
    /// Those that are edited copies of the first.
    edited: Vec<bool>,
    running: HashMap<(usize, Build), Helper>,
    table_bytes: u64,
    stop: Arc<AtomicBool>,
}

impl Trees {
    /// Reads the trees, applies the edits, and compiles each once. What cannot be used is left out, and
    /// the session told why.
    ///
    /// # Errors
    /// Ctrl-C, or no folder to build in.
    pub fn open(
        args: &LinuxArgs,
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
        let edits = Edits::new(args.edits.as_deref());
        for set in &args.with {
            let Some(first) = opened.trees.first().cloned() else { break };
            let edited = edits.apply(&set.0, &first, &opened.workshop);
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
            // Two trees of one version would be one row.
            while self.trees.iter().any(|other| other.name == tree.name) {
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

    /// How many there are.
    pub fn len(&self) -> usize {
        self.trees.len()
    }

    /// What results call one.
    pub fn name(&self, tree: usize) -> &str {
        &self.trees[tree].name
    }

    /// Its version.
    pub fn version(&self, tree: usize) -> String {
        self.trees[tree].version.to_string()
    }

    /// Whether it is an edited copy.
    pub fn is_edited(&self, tree: usize) -> bool {
        self.edited[tree]
    }

    /// The running program of a tree.
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

/// Ctrl-C, as the lab knows it.
pub fn interrupted(error: Error) -> anyhow::Error {
    match error {
        Error::Interrupted => Failure::Interrupted.into(),
        error => error.into(),
    }
}

/// The program for a kind of walks.
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
    /// The turns of a tree beside those of the engine.
    pub fn beside<F: Format>(
        turns: &Turns<F>,
        trees: &Rc<RefCell<Trees>>,
        tree: usize,
        kind: WalkKind,
    ) -> Self {
        let range = turns.bed.range();
        let addresses = if turns.work.op == Op::Lookup { turns.addresses() } else { Vec::new() };
        Self {
            trees: trees.clone(),
            tree,
            kind,
            work: turns.work,
            setting: turns.setting,
            range,
            host: Bed::<F>::host(&range).0,
            left: turns.left.clone(),
            sum: turns.sum(&addresses),
            addresses,
        }
    }

    /// A turn.
    pub fn turn(self) -> impl FnMut(&mut Arena, bool) -> anyhow::Result<Sample> {
        let mut counts = Vec::new();
        move |_, check| {
            let page_shift = self.work.page.bytes().trailing_zeros();
            // Only a CPU without FWB flushes.
            let fwb = self.setting.fwb && self.work.op != Op::Flush;
            let build = |count| build(page_shift, fwb, self.kind, count);
            let mut trees = self.trees.borrow_mut();
            let name = trees.name(self.tree).to_owned();
            if check {
                let counting = self.once(trees.helper(self.tree, build(true))?)?;
                counts = known(&counting);
                // What is not asked again need not stay.
                trees.running.remove(&(self.tree, build(true)));
            }
            let helper = trees.helper(self.tree, build(false))?;
            let answer = self.once(helper)?;
            if check {
                let leaves =
                    helper.leaves(self.range.start().0, self.range.size()).map_err(interrupted)?;
                let ours = self.left.borrow();
                let compared = leaves::compare(&ours, &leaves, self.work.op, &name)
                    .context("the leaves of the engine and of Linux differ")?;
                counts.push(("leaves_compared", compared.leaves));
                let differing =
                    ALLOWED.iter().zip(compared.differing).filter(|(_, seen)| *seen > 0);
                counts.extend(differing.map(|(allowed, seen)| (allowed.name, seen)));
            }
            Ok(Sample { seconds: answer.seconds, counts: counts.clone() })
        }
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
            Op::Lookup => {
                let answer = helper.lookup(&self.addresses).map_err(interrupted)?;
                ensure!(answer.found == self.sum, "Linux found other addresses");
                return Ok(answer);
            }
        };
        let mut answer = call(what)?;
        answer.seconds += before.seconds;
        for ((_, count), (_, more)) in answer.counts.iter_mut().zip(&before.counts) {
            *count += more;
        }
        Ok(answer)
    }
}

/// The counts by names that last.
fn known(answer: &Answer) -> Vec<(&'static str, u64)> {
    const NAMES: [&str; 7] =
        ["visits", "callbacks", "tlbis", "barriers", "pages", "cache_calls", "cache_bytes"];
    let name = |known: &str| NAMES.iter().find(|name| **name == known).copied();
    answer.counts.iter().filter_map(|(found, count)| Some((name(found)?, *count))).collect()
}
