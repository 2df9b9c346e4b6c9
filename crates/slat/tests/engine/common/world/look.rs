//! Operations that look without changing anything: translate, leaves, dump; and flush.

use super::super::Event;
use super::super::hardware::{Hardware, Leaf, Run, append};
use super::shape::maintained;
use super::{World, floor, size};
use slat::{ChangeError, Gpa, GpaRange, Hpa, Interruption, Maintenance, Memory, Software};

impl<H: Hardware> World<'_, H> {
    pub fn translate(&mut self, gpa: u64) {
        let before = self.begin();
        let out = self.run(|guard| (guard.translate(Gpa(gpa)), guard.descriptor(Gpa(gpa))));
        let (found, descriptor) = (out.result.0.unwrap(), out.result.1);
        let expected = self.flat.borrow().at(gpa);
        assert_eq!(found.map(|t| (t.hpa.0, t.attributes)), expected);
        assert_eq!(found.map(|t| t.size.bytes()), before.at(gpa).map(|run| run.size));
        let inside = gpa >> self.hardware.address_bits() == 0;
        assert_eq!(descriptor.is_some(), inside);
        if let Some((raw, covered)) = descriptor {
            let (pte, height) = self.hardware.pte(self.platform, gpa);
            let there = pte.load(std::sync::atomic::Ordering::SeqCst);
            assert_eq!((raw, covered), (there, size(H::size(height))));
        }
        self.settle(&out.tree);
    }

    /// Compares leaves one by one, and all of them as text.
    pub fn look(&mut self, range: GpaRange) {
        let before = self.begin();
        let out = self.run(|guard| {
            let text = guard.dump().to_string();
            (guard.leaves(range).map(|leaves| leaves.collect::<Vec<_>>()), text)
        });
        let (leaves, text) = out.result;
        let legal = self.change_errors(&before, &range, false);
        match leaves {
            Err(reason) => assert!(legal.contains(&reason), "{reason:?}"),
            Ok(leaves) => {
                assert_eq!(legal, []);
                let mut expected = before.within(range.start().0, range.end().0).flat_map(|run| {
                    let first = floor(run.start, run.size);
                    let oa = run.leaf.oa - (run.start - first);
                    (first..run.end).step_by(run.size as usize).map(move |gpa| slat::Leaf {
                        gpa: Gpa(gpa),
                        hpa: Hpa(oa + (gpa - first)),
                        size: size(run.size),
                        attributes: run.leaf.own,
                    })
                });
                assert!(leaves.into_iter().all(|leaf| leaf.ok() == expected.next()), "in order");
                assert_eq!(expected.next(), None, "all of them");
            }
        }
        self.check_dump(&before.runs, &text);
        self.settle(&out.tree);
    }

    fn check_dump(&self, runs: &[Run], text: &str) {
        let mut lines = text.lines();
        let head = lines.next().unwrap();
        let root = format!("{:#x}", self.hardware.root().table);
        assert!(head.contains(&root) && head.contains("VMID 4660"), "{head}");
        let mut all: Vec<Run> = Vec::new();
        for run in runs {
            let leaf = Leaf { reached: true, ..run.leaf };
            append(&mut all, Run { leaf, ..*run });
        }
        for run in &all {
            let line = lines.next().unwrap_or_else(|| panic!("{run:x?} is missing in\n{text}"));
            let words: Vec<_> = line.split_whitespace().collect();
            let [range, "->", hpa, count, "x", leaf, rights, state, memory, ref more @ ..] =
                words[..]
            else {
                panic!("{line}")
            };
            let (start, end) = range.split_once("..").unwrap();
            let number =
                |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
            assert_eq!((number(start), number(end)), (run.start, run.end), "{line}");
            assert_eq!((number(hpa), count.parse()), (run.leaf.oa, Ok(run.leaves())), "{line}");
            assert_eq!(leaf, size(run.size).to_string());
            let own = run.leaf.own;
            let has = |text: &str, flag| text.contains(flag);
            assert_eq!((has(rights, 'r'), has(rights, 'w')), (own.read, own.write), "{line}");
            let execute = match own.execute {
                slat::Execute::None => "-",
                slat::Execute::All => "x",
                slat::Execute::User => "u",
                slat::Execute::Kernel => "k",
            };
            assert_eq!(rights.get(2..), Some(execute), "{line}");
            let more = more.iter().map(|bit| bit.strip_prefix('S').unwrap().parse().unwrap());
            let software = more
                .map(Software::bit)
                .fold(Software::new(has(state, 'S'), has(state, 'T')), Software::union);
            let flags = (has(state, 'A'), has(state, 'D'), software);
            assert_eq!(flags, (own.accessed, own.dirty, own.software), "{line}");
            assert_eq!(memory, format!("{:?}", own.memory));
        }
        assert_eq!(lines.next(), None);
    }

    pub fn flush(&mut self, range: GpaRange) {
        let before = self.begin();
        let out = self.run(|guard| guard.clean_caches(range));
        let (start, end) = (range.start().0, range.end().0);
        let legal = self.change_errors(&before, &range, false);
        if !legal.is_empty() {
            self.refused::<u64, ChangeError>(&before, &out, start, &legal);
            return;
        }
        let mut expected: Vec<(u64, u64)> = Vec::new();
        let mut bytes = 0;
        for run in before.within(start, end).filter(|r| r.leaf.own.memory == Memory::Normal) {
            bytes += run.bytes();
            match expected.last_mut() {
                Some(last) if last.1 == run.leaf.oa => last.1 += run.bytes(),
                _ => expected.push((run.leaf.oa, run.leaf.oa + run.bytes())),
            }
        }
        assert_eq!(out.result, Ok::<_, Interruption<_>>(bytes));
        let found = maintained(&out.events, Some(&Maintenance::Data));
        assert_eq!(found, expected, "exactly what is mapped");
        let others = out.events.iter().filter(|event| !matches!(event, Event::Maintain { .. }));
        assert_eq!(others.count(), 0);
        self.settle(&out.tree);
    }
}
