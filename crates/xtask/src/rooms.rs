//! Checks that modules of a crate, and crates of the workspace, use only those below them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates. Each may depend on those before it.
const CRATES: [&str; 15] = [
    "slat",
    "slat-capi",
    "slat-guest",
    "slat-programs",
    "slat-sim",
    "slat-linux",
    "slat-axvm",
    "slat-reclaim",
    "slat-kvm",
    "slat-kernel",
    "slat-lab",
    "slat-bench",
    "slat-cli",
    "slat-hypervisor",
    "xtask",
];

/// The modules that each module uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The crate whose modules are not checked, as it is several programs.
const APART: [&str; 1] = ["slat-programs"];

/// Returns the module of a path. Modules in some folders count separately from their folder.
fn room(words: &[&str]) -> Option<String> {
    match words {
        ["watch", inner @ ..] if !inner.is_empty() => Some(format!("watch::{}", room(inner)?)),
        [room @ ("guest" | "kvm" | "memslots" | "caches"), inner, ..] => {
            Some(format!("{room}::{inner}"))
        }
        [room, ..] => Some((*room).to_owned()),
        [] => None,
    }
}

/// Returns the text without comments, and without tests, which may use any module.
fn program(text: &str) -> String {
    let code = text.split("\nmod tests {").next().unwrap_or_default();
    code.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect()
}

/// Returns the words of the path at the start of a text.
fn words(text: &str) -> Vec<&str> {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
    text[..end.unwrap_or(text.len())].split("::").collect()
}

/// Returns the path at the start of a text, or those of a group in braces, each as words. Of a
/// group within a group the first path stands for all.
fn paths(text: &str) -> Vec<Vec<&str>> {
    match text.strip_prefix('{').and_then(|group| group.split_once('}')) {
        Some((group, _)) => group.split(',').map(|path| words(path.trim())).collect(),
        None => vec![words(text)],
    }
}

/// Returns the path from which the root of a crate exports `item`, as words.
fn home<'t>(root: &'t str, item: &str) -> Option<Vec<&'t str>> {
    let mut exports = root.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let has =
        |items: &str| items.split(|c: char| !c.is_alphanumeric() && c != '_').any(|it| it == item);
    let path = exports.find(|path| path.rsplit("::").next().is_some_and(has))?;
    Some(path.split("::").collect())
}

fn uses(name: &str) -> Uses {
    let root = match name {
        "slat-hypervisor" => crate::root().join("hypervisor/src"),
        name => crate::root().join("crates").join(name).join("src"),
    };
    let mut files = Vec::new();
    sources(&root, &mut files);
    let name = |path: &Path| {
        let path = path.strip_prefix(&root).unwrap().with_extension("");
        let words: Vec<&str> = path.iter().map(|word| word.to_str().unwrap()).collect();
        room(&words).unwrap()
    };
    let rooms: BTreeSet<String> = files.iter().map(|path| name(path)).collect();
    let main = ["lib.rs", "main.rs"].map(|name| root.join(name));
    let main = main.iter().find(|path| path.exists()).unwrap();
    let exports = program(&std::fs::read_to_string(main).unwrap());
    let mut uses = Uses::new();
    for path in files.iter().filter(|path| !path.ends_with("fake.rs")) {
        let (own, text) = (name(path), program(&std::fs::read_to_string(path).unwrap()));
        let inside = path.strip_prefix(&root).unwrap().with_extension("");
        let above: Vec<&str> =
            inside.parent().unwrap().iter().map(|it| it.to_str().unwrap()).collect();
        let of_root = text.split("crate::").skip(1).flat_map(paths).map(|words| {
            let home = home(&exports, words[0]).filter(|_| !rooms.contains(words[0]));
            home.unwrap_or(words)
        });
        let beside = text.split("super::").skip(1).flat_map(paths);
        let beside = beside.map(|words| [&above[..], &words].concat());
        for words in of_root.chain(beside) {
            let mut used = room(&words).unwrap();
            while let (false, Some((whole, _))) = (rooms.contains(&used), used.rsplit_once("::")) {
                used = whole.to_owned();
            }
            if rooms.contains(&used) && used != own {
                uses.entry(own.clone()).or_default().insert(used);
            }
        }
    }
    uses
}

/// Returns a path from a module back to itself, if there is one.
fn circle(uses: &Uses) -> Option<Vec<String>> {
    fn walk<'u>(
        at: &'u str,
        uses: &'u Uses,
        way: &mut Vec<&'u str>,
        done: &mut BTreeSet<&'u str>,
    ) -> Option<Vec<String>> {
        if let Some(first) = way.iter().position(|room| *room == at) {
            return Some(way[first..].iter().map(|room| (*room).to_owned()).collect());
        }
        if !done.insert(at) {
            return None;
        }
        way.push(at);
        let found = uses.get(at).into_iter().flatten().find_map(|used| walk(used, uses, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    uses.keys().find_map(|room| walk(room, uses, &mut Vec::new(), &mut done))
}

#[test]
fn no_module_uses_one_that_uses_it() {
    let mut pairs = 0;
    for name in CRATES.into_iter().filter(|name| !APART.contains(name)) {
        let uses = uses(name);
        pairs += uses.values().map(BTreeSet::len).sum::<usize>();
        assert_eq!(circle(&uses), None, "{name}");
    }
    assert!(pairs > 500, "only {pairs} uses of a module by another were found");
}

#[test]
fn a_circle_is_found() {
    let uses = |pairs: &[(&str, &str)]| {
        let mut uses = Uses::new();
        for (one, other) in pairs {
            uses.entry((*one).to_owned()).or_default().insert((*other).to_owned());
        }
        uses
    };
    assert_eq!(circle(&uses(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    let found = circle(&uses(&[("a", "b"), ("b", "c"), ("c", "b")])).unwrap();
    assert_eq!(found, ["b", "c"]);
}

#[test]
fn crates_depend_on_those_before_them_alone() {
    let entries = std::fs::read_dir(crate::root().join("crates")).unwrap();
    let others = ["hypervisor", "tests/programs"];
    let folders = entries.map(|entry| entry.unwrap().path());
    let folders = folders.chain(others.map(|at| crate::root().join(at)));
    let manifests: Vec<_> = folders.map(|folder| folder.join("Cargo.toml")).collect();
    let place = |name: &str| CRATES.iter().position(|known| *known == name);
    let mut seen = 0;
    for path in manifests.iter().filter(|path| path.exists()) {
        let manifest: toml::Table = std::fs::read_to_string(path).unwrap().parse().unwrap();
        let name = manifest["package"]["name"].as_str().unwrap();
        let own = place(name).unwrap_or_else(|| panic!("{name} is not in the order of crates"));
        seen += 1;
        let below = manifest.get("dependencies").and_then(toml::Value::as_table);
        for used in below.into_iter().flat_map(toml::Table::keys) {
            if let Some(used_place) = place(used) {
                assert!(used_place < own, "{name} depends on {used}, which is above it");
            }
        }
    }
    assert_eq!(seen, CRATES.len());
}

/// Files that write what no user named, each in a folder of its own or in an emulated machine.
const WRITERS: [&str; 4] = [
    "slat-bench/src/linux/compile.rs",
    "slat-cli/src/emulate/binary.rs",
    "slat-cli/src/review.rs",
    "slat-lab/src/first.rs",
];

/// Files are written by `slat-lab`'s `files`, which follows no link of another user. (`slat-kvm`
/// writes files of the kernel alone.)
#[test]
fn what_a_user_names_is_written_by_one_file_alone() {
    let crates = crate::root().join("crates");
    let mut writers = BTreeSet::new();
    for name in ["slat-lab", "slat-bench", "slat-cli"] {
        let mut files = Vec::new();
        sources(&crates.join(name).join("src"), &mut files);
        for path in files.iter().filter(|path| !path.ends_with("fake.rs")) {
            let text = program(&std::fs::read_to_string(path).unwrap());
            if ["File::create(", "fs::write(", "fs::copy("].iter().any(|call| text.contains(call)) {
                let path = path.strip_prefix(&crates).unwrap();
                writers.insert(path.display().to_string());
            }
        }
    }
    assert_eq!(writers, WRITERS.map(str::to_owned).into());
}
