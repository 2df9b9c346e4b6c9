//! Linux trees on this machine: `SLAT_LINUX_TREES` names them, separated by colons. Without it
//! nothing is tested, and that is said; `cargo xtask test peers` sets it.

use slat_bench::linux::{Build, Edits, Helper, Op, Prot, Tree, Workshop};
use std::path::Path;
use std::sync::Arc;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

const COUNTING: Build =
    Build { page_shift: 12, address_bits: 40, fwb: true, shared: false, count: true };

fn trees() -> Vec<Tree> {
    let Some(paths) = std::env::var_os("SLAT_LINUX_TREES") else {
        eprintln!("skipped: SLAT_LINUX_TREES names no Linux source tree");
        return Vec::new();
    };
    std::env::split_paths(&paths).map(|path| Tree::open(None, &path).unwrap()).collect()
}

fn start(workshop: &mut Workshop, tree: &Tree, how: Build) -> Helper {
    let program = workshop.build(tree, how).unwrap();
    Helper::start(&tree.name, &program, 64 * MIB, Arc::default()).unwrap()
}

/// Visits, callbacks and table pages of splitting a GiB that is mapped by `leaf`.
fn split(helper: &mut Helper, leaf: u64, chunk: u64) -> [u64; 3] {
    helper.call(Op::Reset).unwrap();
    let all = Op::Build { start: GIB, size: GIB, host: 1 << 40, leaf, prot: Prot::RAM };
    helper.call(all).unwrap();
    let answer = helper.call(Op::Split { start: GIB, size: GIB, chunk }).unwrap();
    let of = |name: &str| answer.counts.iter().find(|(known, _)| known == name).unwrap().1;
    let leaves = helper.leaves(GIB, GIB).unwrap();
    assert_eq!(leaves.len(), 1, "{leaves:x?}");
    assert_eq!((leaves[0].first.size, leaves[0].count), (4096, GIB / 4096));
    assert_eq!(leaves[0].first.raw & ((1 << 48) - 4096), 1 << 40);
    [of("visits"), of("callbacks"), of("tlbis")]
}

#[test]
fn a_split_visits_what_linux_does_and_less_with_the_edits() {
    let mut workshop = Workshop::new().unwrap();
    let edits = Edits::read(None).unwrap();
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    for tree in trees() {
        let mut vanilla = start(&mut workshop, &tree, COUNTING);
        let skip = tree.with(&edits, &named(&["bounded-walks/2"])).unwrap();
        let both = tree.with(&edits, &named(&["bounded-walks"])).unwrap();
        assert_eq!(both.name, format!("{}+bounded-walks", tree.name));
        let mut skip = start(&mut workshop, &skip, COUNTING);
        let mut both = start(&mut workshop, &both, COUNTING);
        let (pages, blocks) = (GIB / 4096, GIB / (2 * MIB));
        for (leaf, chunk, breaks, built) in [
            (4096, 2 * MIB, 0, 0),
            (4096, GIB, 0, 0),
            (2 * MIB, 2 * MIB, blocks, pages),
            (2 * MIB, GIB, blocks, pages),
            (GIB, 2 * MIB, blocks + 1, pages + blocks),
            (GIB, GIB, 1, pages + blocks),
        ] {
            let [visits, callbacks, tlbis] = split(&mut vanilla, leaf, chunk);
            let [fewer, _, same] = split(&mut skip, leaf, chunk);
            let [least, _, _] = split(&mut both, leaf, chunk);
            // Entries of level 3 are visited by their number, and built by a visit each.
            assert!((pages + built..pages + built + 1600).contains(&visits), "{visits}");
            assert!(callbacks >= pages, "{callbacks}");
            assert!((built..built + 1600).contains(&fewer), "{tree:?}: {fewer}");
            // From a block of a GiB, the table above level 3 is left out, too.
            assert!(least <= fewer && (leaf < GIB || chunk < GIB || least < fewer), "{least}");
            assert_eq!((tlbis, same), (breaks, breaks), "{leaf} {chunk}");
        }
    }
}

#[test]
fn every_granule_and_both_kinds_of_walks_leave_the_same_leaves() {
    let mut workshop = Workshop::new().unwrap();
    for tree in trees() {
        for (page_shift, block) in [(12, 2 * MIB), (14, 32 * MIB), (16, 512 * MIB)] {
            let page = 1 << page_shift;
            let mut found = Vec::new();
            for (shared, fwb) in [(false, true), (true, true), (false, false)] {
                let how = Build { page_shift, shared, fwb, ..COUNTING };
                let mut helper = start(&mut workshop, &tree, how);
                helper.call(Op::Reset).unwrap();
                let (start, size, host) = (2 * GIB, GIB, 1 << 40);
                let prot = Prot::RAM;
                helper.call(Op::Map { start, size, host, leaf: block, prot }).unwrap();
                helper.call(Op::Split { start, size: block, chunk: block }).unwrap();
                helper.call(Op::Protect { start, size: 3 * page }).unwrap();
                helper.call(Op::Relax { start: start + page, size: page, prot }).unwrap();
                helper.call(Op::Age { start, size: 5 * page, each: true }).unwrap();
                helper.call(Op::Young { start, size: page }).unwrap();
                let flushed = helper.call(Op::Flush { start, size }).unwrap();
                let bytes =
                    flushed.counts.iter().find(|(name, _)| name == "cache_bytes").unwrap().1;
                assert_eq!(bytes, if fwb { 0 } else { size });
                helper.addresses(&[start + 5, start + 2 * page]).unwrap();
                let looked = helper.call(Op::Lookup).unwrap();
                assert_eq!(looked.found, 2 * host + 5 + 2 * page);
                helper.call(Op::Unmap { start: start + 9 * page, size: page }).unwrap();
                let mut leaves = helper.leaves(start, size).unwrap();
                // Memory attributes are what FWB encodes otherwise.
                leaves.iter_mut().for_each(|run| run.first.raw &= !(0xf << 2));
                found.push(leaves);
            }
            assert!(found[0] == found[1] && found[0] == found[2], "{found:x?}");
            let at: Vec<(u64, u64)> =
                found[0].iter().map(|run| (run.first.gpa, run.count)).collect();
            let gpa = |pages| 2 * GIB + pages * page;
            let rest = block / page - 10;
            // One that is young, one that may be written, one that is both not; two that are old.
            assert_eq!(at[..3], [(gpa(0), 1), (gpa(1), 1), (gpa(2), 1)]);
            assert_eq!(at[3..6], [(gpa(3), 2), (gpa(5), 4), (gpa(10), rest)]);
        }
    }
}

#[test]
fn a_split_in_a_loop_writes_the_same_descriptors_as_the_walk() {
    let mut workshop = Workshop::new().unwrap();
    let edits = Edits::read(None).unwrap();
    let prots = [(true, true, true), (true, false, true), (true, true, false)];
    let prots = prots.map(|(read, write, execute)| Prot { read, write, execute });
    for tree in trees() {
        let edited = tree.with(&edits, &["split-in-a-loop".to_owned()]).unwrap();
        for (page_shift, block) in [(12, 2 * MIB), (12, GIB), (14, 32 * MIB), (16, 512 * MIB)] {
            for fwb in [true, false] {
                let how = Build { page_shift, fwb, ..COUNTING };
                let mut helpers = [&tree, &edited].map(|tree| start(&mut workshop, tree, how));
                for (prot, chunk) in prots.into_iter().zip([block, 2 * MIB, block]) {
                    let [walked, filled] = helpers.each_mut().map(|helper| {
                        helper.call(Op::Reset).unwrap();
                        let host = (1 << 40) - GIB;
                        let all = Op::Build { start: GIB, size: GIB, host, leaf: block, prot };
                        helper.call(all).unwrap();
                        let chunk = chunk.max(1 << (2 * page_shift - 3));
                        let split = Op::Split { start: GIB, size: GIB, chunk };
                        let answer = helper.call(split).unwrap();
                        let of =
                            |(name, count): &(String, u64)| (name == "visits").then_some(*count);
                        let leaves = helper.leaves(GIB, GIB).unwrap();
                        assert_eq!(leaves[0].count, GIB >> page_shift, "{leaves:x?}");
                        (leaves, answer.counts.iter().find_map(of).unwrap())
                    });
                    assert_eq!(walked.0, filled.0, "{how:?}");
                    // The walk visits each page when it fills its entry, and again below.
                    let pages = GIB >> page_shift;
                    assert!(filled.1 < walked.1 && walked.1 - filled.1 >= pages, "{how:?}");
                }
            }
        }
    }
}

#[test]
fn an_edit_that_does_not_fit_says_so() {
    let edits = Edits::read(None).unwrap();
    assert!(edits.series().iter().any(|series| series.name == "bounded-walks"));
    for tree in trees().iter().take(1) {
        let refusal = |edits: &Edits, name: &str, tree: &Tree| {
            tree.with(edits, &[name.to_owned()]).unwrap_err().to_string()
        };
        let text = refusal(&edits, "skip", tree);
        assert!(
            text.contains("no edit is called skip") && text.contains("bounded-walks"),
            "{text}"
        );
        let twice = tree.with(&edits, &["bounded-walks/1".to_owned()]).unwrap();
        let text = refusal(&edits, "bounded-walks/1", &twice);
        assert!(text.contains("has it already"), "{text}");
        let folder = tempfile::tempdir().unwrap();
        let patch = "// file: arch/arm64/kvm/hyp/pgtable.c\n// leaves: zebra_crossing\n\
                     @@\n@@\n-no_such_function();\n";
        std::fs::write(folder.path().join("mine.cocci"), patch).unwrap();
        let read = |folder: &Path| Edits::read(Some(folder)).unwrap();
        let text = refusal(&read(folder.path()), "mine", tree);
        assert!(text.contains("changed nothing here: it adds no `zebra_crossing`"), "{text}");
        let text = Edits::read(Some(Path::new("/nonexistent"))).unwrap_err().to_string();
        assert!(text.contains("cannot read /nonexistent"), "{text}");
    }
}
