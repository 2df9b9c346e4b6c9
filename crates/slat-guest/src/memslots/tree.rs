//! A sorted map: a changed copy shares all parts that did not change.
//!
//! Faults read one list of memslots while a change writes another. If a change copied the whole
//! list, it would copy 32,764 entries in a guest with that many memslots; here it copies the path
//! to its entry. Nodes are in heap order of a priority that is a hash of the entry's number (a
//! treap). So the shape depends on the map's entries and not on the order of insertion, and the
//! depth is the depth of random insertion: 1.4 binary logarithms of the size for the average entry.
//!
//! An entry covers addresses up to its `end`, and each node has the greatest end below it. So a
//! search for entries that reach beyond an address skips those that do not.

use alloc::sync::Arc;

/// The map.
#[derive(Clone, Debug)]
pub(crate) struct Tree<K, V> {
    root: Link<K, V>,
}

type Link<K, V> = Option<Arc<Node<K, V>>>;

/// An entry.
#[derive(Clone, Debug)]
pub(crate) struct Entry<K, V> {
    pub key: K,
    /// The end of the addresses that it covers.
    pub end: u64,
    /// A number that no other entry has; the priority comes from it.
    pub number: u64,
    pub value: V,
}

#[derive(Clone, Debug)]
struct Node<K, V> {
    entry: Entry<K, V>,
    /// The greatest end here and below.
    reach: u64,
    left: Link<K, V>,
    right: Link<K, V>,
}

impl<K, V> Default for Tree<K, V> {
    fn default() -> Self {
        Self { root: None }
    }
}

/// Returns the priority of an entry. Different numbers have different priorities (splitmix64 is a
/// bijection).
const fn priority(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn reach<K, V>(link: &Link<K, V>) -> u64 {
    link.as_ref().map_or(0, |node| node.reach)
}

fn node<K, V>(entry: Entry<K, V>, left: Link<K, V>, right: Link<K, V>) -> Link<K, V> {
    let reach = entry.end.max(reach(&left)).max(reach(&right));
    Some(Arc::new(Node { entry, reach, left, right }))
}

/// Returns the entries before `key`, and those from `key` on.
fn split<K: Ord + Clone, V: Clone>(link: &Link<K, V>, key: &K) -> (Link<K, V>, Link<K, V>) {
    let Some(top) = link else { return (None, None) };
    if top.entry.key < *key {
        let (before, behind) = split(&top.right, key);
        (node(top.entry.clone(), top.left.clone(), before), behind)
    } else {
        let (before, behind) = split(&top.left, key);
        (before, node(top.entry.clone(), behind, top.right.clone()))
    }
}

/// Joins two maps; all entries of the first are before those of the second.
fn join<K: Clone, V: Clone>(before: &Link<K, V>, behind: &Link<K, V>) -> Link<K, V> {
    let (Some(one), Some(other)) = (before, behind) else {
        return before.clone().or_else(|| behind.clone());
    };
    if priority(one.entry.number) > priority(other.entry.number) {
        node(one.entry.clone(), one.left.clone(), join(&one.right, behind))
    } else {
        node(other.entry.clone(), join(before, &other.left), other.right.clone())
    }
}

fn insert<K: Ord + Clone, V: Clone>(link: &Link<K, V>, new: Entry<K, V>) -> Link<K, V> {
    match link {
        Some(top) if priority(top.entry.number) > priority(new.number) => {
            let (mut left, mut right) = (top.left.clone(), top.right.clone());
            match new.key < top.entry.key {
                true => left = insert(&left, new),
                false => right = insert(&right, new),
            }
            node(top.entry.clone(), left, right)
        }
        _ => {
            let (left, right) = split(link, &new.key);
            node(new, left, right)
        }
    }
}

fn remove<K: Ord + Clone, V: Clone>(link: &Link<K, V>, key: &K) -> Link<K, V> {
    let top = link.as_ref()?;
    match key.cmp(&top.entry.key) {
        core::cmp::Ordering::Equal => join(&top.left, &top.right),
        core::cmp::Ordering::Less => {
            node(top.entry.clone(), remove(&top.left, key), top.right.clone())
        }
        core::cmp::Ordering::Greater => {
            node(top.entry.clone(), top.left.clone(), remove(&top.right, key))
        }
    }
}

impl<K: Ord + Clone, V: Clone> Tree<K, V> {
    /// Adds an entry, or replaces the one with its key.
    pub fn put(&mut self, entry: Entry<K, V>) {
        self.remove(&entry.key);
        self.root = insert(&self.root, entry);
    }

    pub fn remove(&mut self, key: &K) {
        if self.get(key).is_some() {
            self.root = remove(&self.root, key);
        }
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        let mut link = &self.root;
        while let Some(node) = link {
            link = match key.cmp(&node.entry.key) {
                core::cmp::Ordering::Equal => return Some(&node.entry.value),
                core::cmp::Ordering::Less => &node.left,
                core::cmp::Ordering::Greater => &node.right,
            };
        }
        None
    }

    /// Returns the last entry whose key is at most `key`.
    #[inline]
    pub fn at_most(&self, key: &K) -> Option<&Entry<K, V>> {
        let (mut link, mut found) = (&self.root, None);
        while let Some(node) = link {
            link = match node.entry.key <= *key {
                true => {
                    found = Some(&node.entry);
                    &node.right
                }
                false => &node.left,
            };
        }
        found
    }

    /// Returns the entries that reach beyond `from`, in order; each is searched for when it is
    /// asked for.
    pub fn beyond(&self, from: u64) -> impl Iterator<Item = &Entry<K, V>> {
        let mut last: Option<&K> = None;
        core::iter::from_fn(move || {
            let entry = next(&self.root, last, from)?;
            last = Some(&entry.key);
            Some(entry)
        })
    }
}

/// Returns the first entry behind `last` that reaches beyond `from`. If a subtree has such an entry
/// and lies behind `last`, the entry is found there: only nodes on the path to `last` are visited
/// without result.
fn next<'t, K: Ord, V>(
    link: &'t Link<K, V>,
    last: Option<&K>,
    from: u64,
) -> Option<&'t Entry<K, V>> {
    #[cfg(all(test, not(loom)))]
    tests::seen();
    let node = link.as_ref().filter(|node| node.reach > from)?;
    if last.is_none_or(|last| *last < node.entry.key) {
        if let Some(entry) = next(&node.left, last, from) {
            return Some(entry);
        }
        if node.entry.end > from {
            return Some(&node.entry);
        }
    }
    next(&node.right, last, from)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use core::cell::Cell;
    use std::collections::BTreeMap;
    use std::collections::HashSet;
    use std::thread_local;

    thread_local! { static COMPARED: Cell<u64> = const { Cell::new(0) }; }

    /// A key that counts its comparisons.
    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Key(u64);

    impl Ord for Key {
        fn cmp(&self, other: &Self) -> core::cmp::Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Key {
        fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
            Some(self.cmp(other))
        }
    }

    /// Counts a visit of a node.
    pub fn seen() {
        COMPARED.set(COMPARED.get() + 1);
    }

    fn compared<R>(work: impl FnOnce() -> R) -> (u64, R) {
        let before = COMPARED.get();
        let result = work();
        (COMPARED.get() - before, result)
    }

    fn entry(key: u64, bytes: u64, number: u64) -> Entry<Key, u64> {
        Entry { key: Key(key), end: key + bytes, number, value: number }
    }

    fn nodes(tree: &Tree<Key, u64>) -> HashSet<*const Node<Key, u64>> {
        fn add(link: &Link<Key, u64>, found: &mut HashSet<*const Node<Key, u64>>) {
            let Some(node) = link else { return };
            found.insert(Arc::as_ptr(node));
            add(&node.left, found);
            add(&node.right, found);
        }
        let mut found = HashSet::new();
        add(&tree.root, &mut found);
        found
    }

    const SLOTS: u64 = 32_764;

    fn large() -> Tree<Key, u64> {
        let mut tree = Tree::default();
        (0..SLOTS).for_each(|number| tree.put(entry(number * 16, 16, number)));
        tree
    }

    #[test]
    fn lookups_in_kvms_maximum_of_memslots_compare_few_keys() {
        let tree = large();
        let mut most = [0; 3];
        for number in (0..SLOTS).step_by(7) {
            let key = Key(number * 16);
            let (count, found) = compared(|| tree.get(&key).copied());
            assert_eq!(found, Some(number));
            most[0] = most[0].max(count);
            let (count, found) = compared(|| tree.at_most(&Key(key.0 + 9)).map(|it| it.value));
            assert_eq!(found, Some(number));
            most[1] = most[1].max(count);
            let (count, found) = compared(|| {
                let found = tree.beyond(key.0 + 9).take_while(|it| it.key.0 < key.0 + 20);
                found.map(|it| it.value).collect::<Vec<_>>()
            });
            assert_eq!(found, (number..SLOTS.min(number + 2)).collect::<Vec<_>>());
            most[2] = most[2].max(count);
        }
        // For 2^15 memslots. The third is of two results, and a search for another.
        assert!(most[0] <= 40 && most[1] <= 40 && most[2] <= 300, "{most:?}");
        std::println!("most comparisons, by key, of an address, of a range: {most:?}");
    }

    #[test]
    fn a_change_in_kvms_maximum_of_memslots_copies_few_entries() {
        let before = large();
        let shared = nodes(&before);
        assert_eq!(shared.len() as u64, SLOTS);
        let mut most = [0; 3];
        for number in (0..SLOTS).step_by(3_001) {
            let mut changed = before.clone();
            changed.put(entry(number * 16, 16, number));
            most[0] = most[0].max(nodes(&changed).difference(&shared).count());
            let mut less = before.clone();
            less.remove(&Key(number * 16));
            most[1] = most[1].max(nodes(&less).difference(&shared).count());
            let mut more = before.clone();
            more.put(entry(number * 16 + 8, 1, SLOTS + number));
            most[2] = most[2].max(nodes(&more).difference(&shared).count());
        }
        assert!(most.iter().all(|&most| most <= 60), "{most:?}");
        std::println!("most entries copied by a change, a removal, an insertion: {most:?}");
    }

    /// Entries cover overlapping addresses.
    #[test]
    fn random_changes_and_lookups_agree_with_a_sorted_map() {
        for seed in crate::seed::seeds(20) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut tree, mut model) = (Tree::default(), BTreeMap::new());
            let mut old = Vec::new();
            for number in 0..400 {
                let key = rng.u64(..300);
                match rng.u32(..4) {
                    0 => {
                        tree.remove(&Key(key));
                        model.remove(&key);
                    }
                    _ => {
                        let new = entry(key, rng.u64(1..40), number);
                        model.insert(key, (new.end, number));
                        tree.put(new);
                    }
                }
                if number % 50 == 0 {
                    old.push((tree.clone(), model.clone()));
                }
                let at = rng.u64(..300);
                let got = tree.get(&Key(at)).copied();
                assert_eq!(got, model.get(&at).map(|it| it.1), "{seed}");
                let below = tree.at_most(&Key(at)).map(|it| it.value);
                assert_eq!(below, model.range(..=at).next_back().map(|it| it.1.1), "{seed}");
                let reach: Vec<_> = tree.beyond(at).map(|it| it.value).collect();
                let should = model.values().filter(|(end, _)| *end > at).map(|it| it.1);
                assert_eq!(reach, should.collect::<Vec<_>>(), "{seed}");
            }
            // Copies did not change.
            for (tree, model) in old {
                let all = tree.beyond(0).map(|it| (it.key.0, (it.end, it.value)));
                assert!(all.eq(model), "{seed}");
            }
        }
    }
}
