//! The classes of histories: which steps each has, and what it is about.

use super::generate::{Draw, Means, Plan, Random, generate};
use super::history::{Act, History, Kind, Way};

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

const LOGS: &[Way] = &[Way::Legacy, Way::Manual, Way::InitiallySet];
const WAYS: &[Way] = &[Way::Legacy, Way::Manual, Way::InitiallySet, Way::Ring];
const RING: &[Way] = &[Way::Ring];
const KINDS: &[Kind] = &[Kind::Small, Kind::Huge, Kind::Huge, Kind::Shared];
const HUGE: &[Kind] = &[Kind::Huge];

const MOVING: &[Act] = &[
    Act::Store,
    Act::PageOut,
    Act::Move,
    Act::Move,
    Act::Protect,
    Act::Fork,
    Act::SoftDirty,
    Act::Merge,
    Act::Migrate,
    Act::Discard,
    Act::Remove,
];

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
            draws: &[
                (5, Draw::Log),
                (8, Draw::Fetch),
                (8, Draw::Write),
                (4, Draw::Read),
                (3, Draw::Run),
                (6, Draw::Host),
            ],
            acts: &[Act::Collapse, Act::Collapse, Act::Discard, Act::Store],
            ways: LOGS,
            kinds: &[Kind::Huge, Kind::Huge, Kind::Small],
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
                (10, Draw::Place),
                (4, Draw::Delete),
                (4, Draw::Log),
                (5, Draw::Fetch),
                (10, Draw::Write),
                (8, Draw::Read),
                (2, Draw::Run),
                (2, Draw::Host),
            ],
            acts: &[Act::Collapse, Act::Store, Act::Discard],
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
            draws: &[
                (4, Draw::Log),
                (8, Draw::Fetch),
                (10, Draw::Write),
                (3, Draw::Read),
                (4, Draw::Run),
                (2, Draw::Kick),
                (2, Draw::Host),
            ],
            acts: &[Act::Discard, Act::Collapse, Act::Store],
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
                (2, Draw::Log),
                (4, Draw::Fetch),
                (8, Draw::Write),
                (6, Draw::Read),
                (3, Draw::Run),
                (12, Draw::Host),
                (4, Draw::Exchange),
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
            draws: &[
                (2, Draw::Log),
                (4, Draw::Fetch),
                (8, Draw::Write),
                (6, Draw::Read),
                (3, Draw::Run),
                (10, Draw::Host),
            ],
            acts: &[
                Act::Late,
                Act::Guard,
                Act::Minor,
                Act::Late,
                Act::Guard,
                Act::Discard,
                Act::Collapse,
            ],
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[Act::Late, Act::Guard, Act::Minor],
    },
    Class {
        name: "vcpus",
        about: "vCPUs that stop and go on, by signals too, while logs change",
        plan: Plan {
            draws: &[
                (4, Draw::Log),
                (8, Draw::Fetch),
                (4, Draw::Write),
                (2, Draw::Read),
                (10, Draw::Run),
                (8, Draw::Kick),
                (2, Draw::Place),
                (3, Draw::Host),
            ],
            acts: &[Act::Collapse, Act::Discard, Act::SoftDirty],
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
            draws: &[
                (3, Draw::Log),
                (5, Draw::Fetch),
                (8, Draw::Write),
                (4, Draw::Read),
                (4, Draw::Run),
                (10, Draw::Host),
            ],
            acts: &[Act::Age, Act::Age, Act::Age, Act::Collapse, Act::Discard],
            ways: WAYS,
            kinds: KINDS,
            private: false,
        },
        needs: &[Act::Age],
    },
    Class {
        name: "execute",
        about: "huge pages that are executed from, written, logged and read-only (no-execute huge \
                pages)",
        plan: Plan {
            draws: &[
                (4, Draw::Log),
                (5, Draw::Fetch),
                (6, Draw::Write),
                (6, Draw::Execute),
                (4, Draw::Split),
                (4, Draw::Rom),
                (4, Draw::Read),
                (2, Draw::Run),
                (4, Draw::Host),
            ],
            acts: &[Act::Collapse, Act::Store, Act::Discard, Act::Recover, Act::Balloon],
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
            draws: &[
                (3, Draw::Log),
                (5, Draw::Fetch),
                (8, Draw::Write),
                (5, Draw::Read),
                (4, Draw::Run),
                (9, Draw::Host),
            ],
            acts: &[Act::Balloon, Act::Balloon, Act::Discard, Act::Remove, Act::Collapse],
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
                (3, Draw::Place),
                (1, Draw::Delete),
                (12, Draw::Convert),
                (10, Draw::Write),
                (8, Draw::Read),
                (3, Draw::Run),
                (3, Draw::Execute),
                (6, Draw::Host),
            ],
            acts: &[Act::Punch, Act::Punch, Act::Store, Act::Discard, Act::Collapse],
            ways: &[Way::Legacy],
            kinds: KINDS,
            private: true,
        },
        needs: &[Act::Punch],
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
