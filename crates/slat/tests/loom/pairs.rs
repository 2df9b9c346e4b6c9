//! Every pair of operations on one table of two pages, or on one block, against one set of
//! properties, on each machine: Arm's descriptors with a break for each change of size and without,
//! and Intel's; and RISC-V's, except in CI, where it has one pair only.
//!
//! A CPU with a lazy TLB and walk cache takes part as an operation of its own. No accessed or dirty
//! state that it or software set is lost; protected pages are not written; unmapped memory is not
//! reached, and was handed out once; mapped pages translate right at every moment, and never fault
//! on a machine without breaks. A contended operation is finished after the other threads have
//! ended.

use crate::guest::*;
use crate::hardware::{Use, WalkedFormat};
use crate::machine::*;
use core::ops::Range;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt, TinyRiscV};
use slat::*;
use std::vec::Vec;

/// An operation of a thread on the first 8k of the guest.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Op {
    /// Maps what is not mapped, as the initial state has it.
    Map,
    /// A fault on the second page, which asks the host for the page in between.
    Fault,
    Unmap,
    Protect,
    /// A write fault on the first page.
    Relax,
    /// Takes the right to execute.
    Execute,
    /// Sets only the right to read.
    Set,
    /// Sets all rights.
    Give,
    /// Changes the memory type in place, and leaves only the right to read.
    Retype,
    /// Sets a software bit.
    Mark,
    Split,
    Collapse,
    /// Puts a block in place of the table.
    Whole,
    Age,
    Harvest,
    /// A CPU writes to the first page and reads the second.
    Cpu,
    Translate,
    /// Unmaps, and reclaims at once; all other threads have a reader slot.
    Retire,
}
use Op::*;

/// The initial state.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Tree {
    /// A table of two pages.
    Two,
    /// A table with the first page.
    One,
    /// A block.
    Block,
    /// A table of two pages, folded.
    Group,
}

const ALL: Range<u64> = 0..BLOCK;

/// The part of an operation that is left when the others have ended, and what it needs for that.
enum Left<F: WalkedFormat> {
    Nothing,
    Map(Outcome<MapError>, Cache<F>),
    Unmap(Vec<UnmappedRun>, Outcome<UnmapError>),
    Again(Op),
    Split(Outcome<SplitError>, Cache<F>),
}

fn perform<F: WalkedFormat>(
    op: Op,
    inside: &mut In<'_, F>,
    cache: Option<Cache<F>>,
    tree: Tree,
    whole: Attributes,
) -> Left<F> {
    let again = |failed: bool| if failed { Left::Again(op) } else { Left::Nothing };
    let size = if tree == Tree::Block { BLOCK } else { PAGE };
    match op {
        Map => {
            let mut cache = cache.unwrap();
            Left::Map(inside.map(ALL, RAM, size, &mut cache), cache)
        }
        Fault => {
            let mut cache = cache.unwrap();
            let fits = match inside.guard.reserve(Gpa(PAGE), F::size(0), &mut cache) {
                Ok(pte) => pte.commit(Hpa(MEMORY + PAGE), RAM).expect("a good address"),
                Err(Interruption { reason: MapError::Occupied { .. }, .. }) => Some(0),
                Err(_) => None,
            };
            again(fits.is_none())
        }
        Unmap | Retire => {
            let (removed, rest) = inside.unmap(ALL);
            if op == Retire {
                inside.guard.refresh();
                inside.on.tables().reclaim();
            }
            Left::Unmap(removed, rest)
        }
        Protect => again(inside.protect(ALL).is_some()),
        Execute => again(inside.execute_protect(ALL).is_some()),
        Set => again(inside.set(ALL, Rights::READ).is_some()),
        Give => again(inside.set(ALL, Rights::ALL).is_some()),
        Retype => again(inside.retype(ALL).is_some()),
        Mark => again(inside.mark(ALL).is_some()),
        Relax => {
            again(inside.relax(if size == PAGE { 0..PAGE } else { ALL }, Access::Write).is_some())
        }
        Split => {
            let mut cache = cache.unwrap();
            Left::Split(inside.split(ALL, PAGE, &mut cache).1, cache)
        }
        Collapse => again(inside.collapse(ALL, BLOCK).is_some()),
        Whole => again(inside.replace_table(ALL, whole).is_err()),
        Age => again(!inside.age(ALL, EXACT).1.is_empty()),
        Harvest => again(inside.harvest(ALL).is_some()),
        Cpu => {
            let first = inside.on.access(0, true, Use::Always);
            let second = inside.on.access(PAGE, false, Use::Always);
            assert!(first.is_none_or(|hpa| hpa.0 == MEMORY));
            assert!(second.is_none_or(|hpa| hpa.0 == MEMORY + PAGE));
            again(first.is_none() || second.is_none())
        }
        Translate => {
            let saw = inside.look(PAGE);
            assert!(saw.flatten().is_none_or(|hpa| hpa.0 == MEMORY + PAGE));
            again(saw.flatten().is_none())
        }
    }
}

/// One execution of two operations.
fn model<F: WalkedFormat>(bbm: BreakBeforeMake, tree: Tree, ops: [Op; 2]) {
    let either = |op: Op| ops.contains(&op);
    let both = ops[0] == ops[1];
    let attributes = if either(Cpu) { CLEAN } else { RAM };
    let given = either(Relax) || either(Give);
    let attributes = if given && !either(Cpu) { PROTECTED } else { attributes };
    // A mark that software sets in a table whose place the block has taken is for an access that
    // comes again; the accounts do not know that.
    let marks = [Map, Fault, Relax].into_iter().any(either);
    let whole = if marks { RAM } else { CLEAN };
    let mut guest = On::<F>::new(14, bbm);
    if either(Cpu) {
        guest = guest.running();
    }
    guest = match tree {
        Tree::Two => guest.mapped(ALL, attributes, PAGE),
        Tree::One => guest.mapped(0..PAGE, attributes, PAGE),
        Tree::Block => guest.mapped(ALL, attributes, BLOCK),
        Tree::Group => guest.folded(ALL, attributes, PAGE),
    };
    if either(Cpu) {
        guest.access(0, false, Use::Always);
    }
    let registered = either(Retire);
    let cache = |op: Op| matches!(op, Map | Fault | Split).then(|| guest.cache(1));
    let thread =
        move |op: Op, cache: Option<Cache<F>>, reader: Option<Reader<'static, World>>| match reader
        {
            None => perform(op, &mut guest.inside(), cache, tree, whole),
            Some(mut reader) => perform(op, &mut guest.enter(&mut reader), cache, tree, whole),
        };
    let [mine, others] = ops.map(cache);
    let [reader, other_reader] = [(); 2].map(|()| registered.then(|| guest.reader()));
    let other = spawn(move || thread(ops[1], others, other_reader));
    let here = thread(ops[0], mine, reader);
    let lefts = [here, other.join().unwrap()];

    let unmaps = either(Unmap) || either(Retire);
    let maps = either(Map) || either(Fault) || either(Whole);
    let mut removed = Vec::new();
    let mut pages = Vec::new();
    for left in lefts {
        match left {
            Left::Nothing => {}
            Left::Map(rest, mut cache) => {
                let size = if tree == Tree::Block { BLOCK } else { PAGE };
                // Something else may be mapped now; other models check how a map reports that.
                if rest.as_ref().is_some_and(|rest| rest.reason == MapError::Contended) && !unmaps {
                    let rest = guest.map(rest.unwrap().range, RAM, size, &mut cache);
                    assert!(rest.is_none() || attributes != RAM || either(Retype), "{rest:?}");
                }
                pages.push(cache);
            }
            Left::Split(rest, mut cache) => {
                if rest.is_some() && !unmaps {
                    guest.split_rest(rest, PAGE, &mut cache);
                }
                pages.push(cache);
            }
            Left::Unmap(some, rest) => {
                removed.extend(some);
                let rest =
                    rest.map(|rest| Rest { range: rest.range.start & !(PAGE - 1)..BLOCK, ..rest });
                if maps {
                    removed = guest.unmap_rest_unless((removed, rest), 0..BLOCK);
                } else {
                    removed = guest.unmap_rest((removed, rest));
                }
            }
            Left::Again(Cpu) => {
                let protects = [Protect, Set, Retype].into_iter().any(either);
                let may = unmaps || protects || bbm == ALWAYS || either(Whole);
                assert!(may || tree == Tree::One, "a fault without a reason");
            }
            Left::Again(Translate) => {
                let breaks = bbm == ALWAYS || [Collapse, Retype, Whole].into_iter().any(either);
                let may = unmaps || breaks || tree != Tree::Two;
                assert!(may, "a page vanished");
            }
            Left::Again(Fault) => {
                let others = [Map, Collapse, Split, Whole];
                assert!(unmaps || both || others.into_iter().any(either));
            }
            Left::Again(Age) if both || either(Collapse) || bbm == ALWAYS || unmaps => {}
            Left::Again(Age) if either(Retype) || either(Whole) => {}
            // The other operation has unfolded it.
            Left::Again(Age) if tree == Tree::Group => {}
            Left::Again(Age) => panic!("nobody kept the page from being answered"),
            Left::Again(_) if unmaps => {}
            // It is a block by now, which the page cuts.
            Left::Again(Relax) if either(Collapse) || either(Whole) => {
                guest.relax_rest(
                    Some(Rest { range: ALL, reason: ChangeError::Contended }),
                    Access::Write,
                );
            }
            Left::Again(op) => {
                let left = perform(op, &mut guest.inside(), None, tree, whole);
                assert!(matches!(left, Left::Nothing), "{op:?} is contended by nobody");
            }
        }
    }
    judge(guest, tree, ops, &removed);
    drop(pages);
    if registered {
        // The thread that held the entry has left.
        let freed = [(); 3].map(|()| guest.tables().reclaim());
        assert_eq!(freed[2], 0);
        assert_eq!(guest.pages(), 1 + guest.linked(), "a table was left behind");
    }
    let kept = guest.pages() - 1 - guest.linked();
    guest.end(kept);
}

/// Properties that must hold at the end.
fn judge<F: WalkedFormat>(guest: On<F>, tree: Tree, ops: [Op; 2], removed: &[UnmappedRun]) {
    let either = |op: Op| ops.contains(&op);
    let unmaps = either(Unmap) || either(Retire);
    let maps = either(Map) || either(Fault) || either(Whole);
    bytes(removed);
    for page in pages(&ALL) {
        let gone =
            removed.iter().filter(|leaf| (leaf.gpa.0..leaf.gpa.0 + leaf.bytes).contains(&page));
        let gone = gone.count();
        let stands = guest.at(page);
        let there = tree != Tree::One || page == 0;
        if !maps {
            assert_eq!(gone, usize::from(unmaps && there), "{page:#x} handed out");
            assert_eq!(stands.is_some(), there && !unmaps, "{page:#x} stands");
        } else {
            // It was mapped once more at most, and then is there or was handed out.
            assert!(unmaps || stands.is_some() || page != 0);
            assert!(!there || gone + usize::from(stands.is_some()) >= 1, "{page:#x} was lost");
        }
        let Some(Translation { attributes, size, .. }) = stands else { continue };
        let given = [Relax, Give, Map, Fault, Whole].into_iter().any(either);
        if [Protect, Set, Retype].into_iter().any(either) && !given {
            assert!(!attributes.write, "{page:#x} is writable again");
        }
        if [Execute, Set, Retype].into_iter().any(either) && !given {
            assert_eq!(attributes.execute, slat::Execute::None);
        }
        let taken = [Protect, Set, Retype, Execute, Map, Fault, Collapse, Split];
        if either(Give) && !taken.into_iter().any(either) {
            assert!(attributes.write && attributes.execute == slat::Execute::All);
        }
        if either(Mark) && !maps && !unmaps && !either(Retype) {
            assert!(attributes.software.contains(Software::B), "{page:#x} lost a software bit");
        }
        if either(Collapse) != either(Split) && !maps && !unmaps {
            let one = if either(Split) { PAGE } else { BLOCK };
            // Leaves whose rights or software bits differ meanwhile do not collapse.
            let told = [Relax, Protect, Execute, Set, Give, Mark, Retype];
            let odd = told.into_iter().any(either) || tree == Tree::One;
            assert!(odd || size.bytes() == one, "{size} at {page:#x}");
        }
    }
    guest.settle();
}

fn on_all(tree: Tree, ops: [Op; 2], bound: Option<usize>) {
    // In CI, groups are paired with the CPU only, which no marker stops.
    let in_ci = std::env::var_os("LOOM_MAX_PREEMPTIONS").is_some();
    if in_ci && tree == Tree::Group && !ops.contains(&Cpu) {
        return;
    }
    let name = |machine: &str| std::format!("{:?} || {:?}, {tree:?}, {machine}", ops[0], ops[1]);
    run(&name("Arm"), bound, move || model::<Tiny>(NEVER, tree, ops));
    // Without a change of size there is no break.
    if [Split, Collapse, Whole].iter().any(|op| ops.contains(op)) || tree == Tree::Group {
        run(&name("Arm, break"), bound, move || model::<Tiny>(ALWAYS, tree, ops));
    }
    if tree != Tree::Group {
        run(&name("Intel"), bound, move || model::<TinyEpt>(NEVER, tree, ops));
        // RISC-V has nothing that neither of the others has. In CI it runs only the pair in which
        // hardware marks leaves that move.
        if ops == [Collapse, Cpu] || !in_ci {
            run(&name("RISC-V"), bound, move || model::<TinyRiscV>(NEVER, tree, ops));
        }
    }
}

macro_rules! pairs {
    ($($name:ident: $tree:ident, $one:ident, $other:ident $(, at most $bound:literal)?;)*) => {$(
        #[test]
        fn $name() {
            let bound = None$(.or(Some($bound)))?;
            on_all(Tree::$tree, [$one, $other], bound);
        }
    )*};
}
pairs! {
    map_and_map: One, Map, Map;
    map_and_fault: One, Map, Fault;
    map_and_unmap: One, Map, Unmap, at most 3;
    map_and_write_protect: One, Map, Protect;
    map_and_relax: One, Map, Relax;
    map_and_execute_protect: One, Map, Execute;
    map_and_split: Block, Map, Split;
    map_and_collapse: Two, Map, Collapse, at most 3;
    map_and_age: One, Map, Age, at most 4;
    map_and_harvest: One, Map, Harvest;
    map_and_hardware: One, Map, Cpu;
    map_and_translate: One, Map, Translate;
    map_and_reclaim: One, Map, Retire, at most 2;
    fault_and_fault: One, Fault, Fault;
    fault_and_unmap: One, Fault, Unmap;
    fault_and_write_protect: One, Fault, Protect;
    fault_and_relax: One, Fault, Relax;
    fault_and_execute_protect: One, Fault, Execute;
    fault_and_split: Block, Fault, Split;
    fault_and_collapse: One, Fault, Collapse;
    fault_and_age: One, Fault, Age;
    fault_and_harvest: One, Fault, Harvest;
    fault_and_hardware: One, Fault, Cpu;
    fault_and_translate: One, Fault, Translate;
    fault_and_reclaim: One, Fault, Retire, at most 3;
    unmap_and_unmap: Two, Unmap, Unmap, at most 2;
    unmap_and_write_protect: Two, Unmap, Protect, at most 4;
    unmap_and_relax: Two, Unmap, Relax, at most 4;
    unmap_and_execute_protect: Two, Unmap, Execute, at most 4;
    unmap_and_split: Block, Unmap, Split;
    unmap_and_collapse: Two, Unmap, Collapse, at most 4;
    unmap_and_age: Two, Unmap, Age, at most 3;
    unmap_and_harvest: Two, Unmap, Harvest, at most 4;
    unmap_and_hardware: Two, Unmap, Cpu, at most 4;
    unmap_and_translate: Two, Unmap, Translate;
    unmap_and_reclaim: Two, Unmap, Retire, at most 2;
    write_protect_and_write_protect: Two, Protect, Protect;
    write_protect_and_relax: Two, Protect, Relax;
    write_protect_and_execute_protect: Two, Protect, Execute;
    write_protect_and_split: Block, Protect, Split;
    write_protect_and_collapse: Two, Protect, Collapse, at most 4;
    write_protect_and_age: Two, Protect, Age;
    write_protect_and_harvest: Two, Protect, Harvest;
    write_protect_and_hardware: Two, Protect, Cpu;
    write_protect_and_translate: Two, Protect, Translate;
    write_protect_and_reclaim: Two, Protect, Retire, at most 3;
    relax_and_relax: Two, Relax, Relax, at most 4;
    relax_and_execute_protect: Two, Relax, Execute;
    relax_and_split: Block, Relax, Split;
    relax_and_collapse: Two, Relax, Collapse, at most 4;
    relax_and_age: Two, Relax, Age;
    relax_and_harvest: Two, Relax, Harvest;
    relax_and_hardware: Two, Relax, Cpu;
    relax_and_translate: Two, Relax, Translate;
    relax_and_reclaim: Two, Relax, Retire, at most 3;
    execute_protect_and_execute_protect: Two, Execute, Execute;
    execute_protect_and_split: Block, Execute, Split;
    execute_protect_and_collapse: Two, Execute, Collapse, at most 4;
    execute_protect_and_age: Two, Execute, Age;
    execute_protect_and_harvest: Two, Execute, Harvest;
    execute_protect_and_hardware: Two, Execute, Cpu;
    execute_protect_and_translate: Two, Execute, Translate;
    execute_protect_and_reclaim: Two, Execute, Retire, at most 3;
    protect_and_map: One, Set, Map;
    protect_and_fault: One, Set, Fault;
    protect_and_unmap: Two, Set, Unmap, at most 4;
    protect_and_write_protect: Two, Set, Protect;
    protect_and_relax: Two, Set, Relax;
    protect_and_execute_protect: Two, Set, Execute;
    protect_and_protect: Two, Set, Set;
    protect_and_giving: Two, Set, Give;
    protect_and_split: Block, Set, Split;
    protect_and_collapse: Two, Set, Collapse, at most 4;
    protect_and_age: Two, Set, Age;
    protect_and_harvest: Two, Set, Harvest;
    protect_and_hardware: Two, Set, Cpu;
    protect_and_translate: Two, Set, Translate;
    protect_and_reclaim: Two, Set, Retire, at most 3;
    mark_and_map: One, Mark, Map;
    mark_and_fault: One, Mark, Fault;
    mark_and_unmap: Two, Mark, Unmap, at most 4;
    mark_and_write_protect: Two, Mark, Protect;
    mark_and_relax: Two, Mark, Relax;
    mark_and_execute_protect: Two, Mark, Execute;
    mark_and_protect: Two, Mark, Set;
    mark_and_mark: Two, Mark, Mark;
    mark_and_split: Block, Mark, Split;
    mark_and_collapse: Two, Mark, Collapse, at most 4;
    mark_and_age: Two, Mark, Age;
    mark_and_harvest: Two, Mark, Harvest;
    mark_and_hardware: Two, Mark, Cpu;
    mark_and_translate: Two, Mark, Translate;
    mark_and_reclaim: Two, Mark, Retire, at most 3;
    giving_and_giving: Two, Give, Give, at most 4;
    giving_and_unmap: Two, Give, Unmap, at most 4;
    giving_and_collapse: Two, Give, Collapse, at most 4;
    giving_and_hardware: Two, Give, Cpu;
    replace_and_map: One, Retype, Map;
    replace_and_fault: One, Retype, Fault;
    replace_and_unmap: Two, Retype, Unmap, at most 3;
    replace_and_write_protect: Two, Retype, Protect;
    replace_and_relax: Two, Retype, Relax;
    replace_and_execute_protect: Two, Retype, Execute, at most 4;
    replace_and_protect: Two, Retype, Set, at most 4;
    replace_and_replace: Two, Retype, Retype, at most 4;
    replace_and_split: Block, Retype, Split;
    replace_and_collapse: Two, Retype, Collapse, at most 3;
    replace_and_age: Two, Retype, Age, at most 3;
    replace_and_harvest: Two, Retype, Harvest, at most 4;
    replace_and_hardware: Two, Retype, Cpu, at most 4;
    replace_and_translate: Two, Retype, Translate;
    replace_and_reclaim: Two, Retype, Retire, at most 2;
    of_a_group_replace_and_hardware: Group, Retype, Cpu, at most 2;
    replace_table_and_map: One, Whole, Map, at most 4;
    replace_table_and_fault: One, Whole, Fault;
    replace_table_and_unmap: Two, Whole, Unmap, at most 4;
    replace_table_and_write_protect: Two, Whole, Protect, at most 4;
    replace_table_and_relax: Two, Whole, Relax, at most 4;
    replace_table_and_execute_protect: Two, Whole, Execute, at most 4;
    replace_table_and_protect: Two, Whole, Set, at most 4;
    replace_table_and_giving: Two, Whole, Give, at most 4;
    replace_table_and_mark: Two, Whole, Mark, at most 4;
    replace_table_and_replace: Two, Whole, Retype, at most 4;
    replace_table_and_replace_table: Two, Whole, Whole, at most 4;
    replace_table_and_split: Block, Whole, Split;
    replace_table_and_collapse: Two, Whole, Collapse, at most 4;
    replace_table_and_age: Two, Whole, Age, at most 4;
    replace_table_and_harvest: Two, Whole, Harvest, at most 4;
    replace_table_and_hardware: Two, Whole, Cpu;
    replace_table_and_translate: Two, Whole, Translate;
    replace_table_and_reclaim: Two, Whole, Retire, at most 3;
    of_a_group_replace_table_and_hardware: Group, Whole, Cpu, at most 2;
    of_a_group_replace_table_and_unmap: Group, Whole, Unmap, at most 2;
    of_a_group_replace_table_and_age: Group, Whole, Age, at most 2;
    of_a_group_replace_table_and_mark: Group, Whole, Mark, at most 2;
    of_a_group_replace_table_and_write_protect: Group, Whole, Protect, at most 2;
    split_and_split: Block, Split, Split;
    split_and_collapse_of_a_table: Two, Split, Collapse;
    split_and_collapse: Block, Split, Collapse;
    split_and_age: Block, Split, Age;
    split_and_harvest: Block, Split, Harvest;
    split_and_hardware: Block, Split, Cpu;
    split_and_translate: Block, Split, Translate;
    split_and_reclaim: Block, Split, Retire;
    collapse_and_collapse: Two, Collapse, Collapse, at most 4;
    collapse_and_age: Two, Collapse, Age, at most 3;
    collapse_and_harvest: Two, Collapse, Harvest, at most 4;
    collapse_and_hardware: Two, Collapse, Cpu;
    collapse_and_translate: Two, Collapse, Translate;
    collapse_and_reclaim: Two, Collapse, Retire, at most 3;
    age_and_age: Two, Age, Age;
    age_and_harvest: Two, Age, Harvest;
    age_and_hardware: Two, Age, Cpu;
    age_and_translate: Two, Age, Translate;
    age_and_reclaim: Two, Age, Retire, at most 2;
    harvest_and_harvest: Two, Harvest, Harvest;
    harvest_and_hardware: Two, Harvest, Cpu;
    harvest_and_translate: Two, Harvest, Translate;
    harvest_and_reclaim: Two, Harvest, Retire, at most 3;
    hardware_and_translate: Two, Cpu, Translate;
    hardware_and_reclaim: Two, Cpu, Retire, at most 3;
    translate_and_reclaim: Two, Translate, Retire;
    reclaim_and_reclaim: Two, Retire, Retire, at most 1;
    of_a_group_map_and_unmap: Group, Map, Unmap, at most 1;
    of_a_group_fault_and_unmap: Group, Fault, Unmap, at most 2;
    of_a_group_unmap_and_unmap: Group, Unmap, Unmap, at most 1;
    of_a_group_unmap_and_write_protect: Group, Unmap, Protect, at most 1;
    of_a_group_unmap_and_relax: Group, Unmap, Relax, at most 1;
    of_a_group_unmap_and_collapse: Group, Unmap, Collapse, at most 2;
    of_a_group_unmap_and_age: Group, Unmap, Age, at most 1;
    of_a_group_unmap_and_hardware: Group, Unmap, Cpu, at most 3;
    of_a_group_write_protect_and_relax: Group, Protect, Relax, at most 3;
    of_a_group_write_protect_and_collapse: Group, Protect, Collapse, at most 1;
    of_a_group_write_protect_and_age: Group, Protect, Age, at most 3;
    of_a_group_write_protect_and_hardware: Group, Protect, Cpu, at most 3;
    of_a_group_write_protect_and_translate: Group, Protect, Translate, at most 3;
    of_a_group_relax_and_relax: Group, Relax, Relax, at most 3;
    of_a_group_relax_and_age: Group, Relax, Age, at most 3;
    of_a_group_relax_and_hardware: Group, Relax, Cpu, at most 3;
    of_a_group_collapse_and_age: Group, Collapse, Age, at most 3;
    of_a_group_collapse_and_hardware: Group, Collapse, Cpu, at most 3;
    of_a_group_harvest_and_harvest: Group, Harvest, Harvest, at most 3;
    of_a_group_harvest_and_age: Group, Harvest, Age, at most 3;
    of_a_group_harvest_and_hardware: Group, Harvest, Cpu, at most 3;
    of_a_group_age_and_age: Group, Age, Age, at most 3;
    of_a_group_age_and_hardware: Group, Age, Cpu, at most 3;
}
