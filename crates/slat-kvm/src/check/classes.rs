//! The classes of histories: which steps each has, and what it is about.

use super::generate::Draw::*;
use super::generate::{Means, Plan, Random, generate};
use super::history::Act::{self, *};
use super::history::History;
use super::history::Kind::{self, *};
use super::history::Way::{self, *};

/// A class of histories.
#[derive(Debug, Clone, Copy)]
pub struct Class {
    /// Its name, as it is given on the command line.
    pub name: &'static str,
    /// What it drives.
    pub about: &'static str,
    plan: Plan,
    /// What the host must be able to do, at least one of these; empty if nothing special.
    needs: &'static [Act],
}

const LOGS: &[Way] = &[Legacy, Manual, InitiallySet];
const WAYS: &[Way] = &[Legacy, Manual, InitiallySet, Ring];
const RING: &[Way] = &[Ring];
const KINDS: &[Kind] = &[Small, Huge, Huge, Shared];
const HUGE: &[Kind] = &[Huge];

const MOVING: &[Act] =
    &[Store, PageOut, Move, Move, Protect, Fork, SoftDirty, Merge, Migrate, Discard, Remove];

/// Returns all classes.
pub fn classes() -> &'static [Class] {
    &CLASSES
}

static CLASSES: [Class; 10] = [
    Class {
        name: "log",
        about: "logs that start, are cleared and end, beside MADV_DONTNEED and huge pages that \
                form (MADV_COLLAPSE)",
        plan: Plan {
            draws: &[(5, Log), (8, Fetch), (8, Write), (4, Read), (3, Run), (6, Host)],
            acts: &[Collapse, Collapse, Discard, Store],
            ways: LOGS,
            kinds: &[Huge, Huge, Small],
            private: false,
        },
        needs: &[],
    },
    Class {
        name: "memslots",
        about: "memslots that are moved, deleted, read-only, aliases, of three pages, at odd \
                offsets",
        plan: Plan {
            draws: &[
                (10, Place),
                (4, Delete),
                (4, Log),
                (5, Fetch),
                (10, Write),
                (8, Read),
                (2, Run),
                (2, Host),
            ],
            acts: &[Collapse, Store, Discard],
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[],
    },
    Class {
        name: "rings",
        about: "dirty rings that become full, and that two threads reset",
        plan: Plan {
            draws: &[(4, Log), (8, Fetch), (10, Write), (3, Read), (4, Run), (2, Kick), (2, Host)],
            acts: &[Discard, Collapse, Store],
            ways: RING,
            kinds: KINDS,
            private: false,
        },
        needs: &[],
    },
    Class {
        name: "host-pages",
        about: "host pages that move: mremap, copies after fork, MADV_PAGEOUT and swap, KSM, NUMA",
        plan: Plan {
            draws: &[
                (2, Log),
                (4, Fetch),
                (8, Write),
                (6, Read),
                (3, Run),
                (12, Host),
                (4, Exchange),
            ],
            acts: MOVING,
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[],
    },
    Class {
        name: "userfaultfd",
        about: "pages that a thread gives back or allows to be written: MISSING, WP, MINOR",
        plan: Plan {
            draws: &[(2, Log), (4, Fetch), (8, Write), (6, Read), (3, Run), (10, Host)],
            acts: &[Late, Guard, Minor, Late, Guard, Discard, Collapse],
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[Late, Guard, Minor],
    },
    Class {
        name: "vcpus",
        about: "vCPUs that stop and go on, by signals too, while logs change",
        plan: Plan {
            draws: &[
                (4, Log),
                (8, Fetch),
                (4, Write),
                (2, Read),
                (10, Run),
                (8, Kick),
                (2, Place),
                (3, Host),
            ],
            acts: &[Collapse, Discard, SoftDirty],
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[],
    },
    Class {
        name: "ageing",
        about: "pages that the host marks as not used, beside writes and logs",
        plan: Plan {
            draws: &[(3, Log), (5, Fetch), (8, Write), (4, Read), (4, Run), (10, Host)],
            acts: &[Age, Age, Age, Collapse, Discard],
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[Age],
    },
    Class {
        name: "execute",
        about: "huge pages that are executed from, written, logged and read-only (no-execute huge \
                pages)",
        plan: Plan {
            draws: &[
                (4, Log),
                (5, Fetch),
                (6, Write),
                (6, Execute),
                (4, Split),
                (4, Rom),
                (4, Read),
                (2, Run),
                (4, Host),
            ],
            acts: &[Collapse, Store, Discard, Recover, Balloon],
            ways: WAYS,
            kinds: HUGE,
            private: false,
        },
        needs: &[],
    },
    Class {
        name: "balloon",
        about: "pages that a balloon and free page reporting give back, one by one and in huge \
                pages, beside writes and logs",
        plan: Plan {
            draws: &[(3, Log), (5, Fetch), (8, Write), (5, Read), (4, Run), (9, Host)],
            acts: &[Balloon, Balloon, Discard, Remove, Collapse],
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[],
    },
    Class {
        name: "guest-memfd",
        about: "guest pages that become private and shared again, and holes in their guest_memfd",
        plan: Plan {
            draws: &[
                (3, Place),
                (1, Delete),
                (12, Convert),
                (10, Write),
                (8, Read),
                (3, Run),
                (3, Execute),
                (6, Host),
            ],
            acts: &[Punch, Punch, Store, Discard, Collapse],
            ways: &[Legacy],
            kinds: KINDS,
            private: true,
        },
        needs: &[Punch],
    },
];

impl Class {
    /// Returns the class of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        CLASSES.iter().find(|class| class.name == name)
    }

    /// Returns why a system cannot try the class, if it cannot.
    pub fn lacks(&self, means: &Means) -> Option<&'static str> {
        if !self.plan.ways.iter().any(|way| means.ways.contains(way)) {
            return Some("this KVM has no dirty rings");
        }
        if !self.plan.kinds.iter().any(|kind| means.kinds.contains(kind)) {
            return Some("transparent huge pages are off");
        }
        let can = self.needs.is_empty() || self.needs.iter().any(|act| means.acts.contains(act));
        (!can).then_some("")
    }

    /// Returns what the host may do in the class.
    pub fn acts(&self) -> impl Iterator<Item = Act> {
        let mut acts = self.plan.acts.to_vec();
        acts.sort_unstable();
        acts.dedup();
        acts.into_iter()
    }

    /// Returns the history of a number, for a seed; nothing if the system lacks what it takes.
    pub fn history(&self, seed: u64, number: u64, means: &Means) -> Option<History> {
        let of_class =
            self.name.bytes().fold(0u64, |hash, byte| hash.rotate_left(7) ^ u64::from(byte));
        let mut random = Random(seed ^ of_class.rotate_left(32));
        let seed = random.draw().wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        generate(self.name, &self.plan, seed, means)
    }
}
