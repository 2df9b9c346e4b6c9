//! Checks that modules of a crate, and crates of the workspace, use only those below them.
//!
//! A module is a file. It uses another one if its code, without tests, has a path to something that
//! the other one defines, also where a third one re-exports it. A circle of such uses is right only
//! between a module and those inside it, which are its parts.

use crate::workspace::packages;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates. Each may depend on those before it.
const CRATES: [&str; 15] = [
    "slat", "slat-capi", "slat-guest", "slat-programs", "slat-sim", "slat-linux", "slat-axvm",
    "slat-reclaim", "slat-kvm", "slat-kernel", "slat-lab", "slat-bench", "slat-cli",
    "slat-hypervisor", "xtask",
];

/// A path, as words.
type Words = Vec<String>;

/// A module of a program: the root, or a file that `mod` names.
#[derive(Default)]
struct Module {
    file: PathBuf,
    /// The module around it; for the root, the root.
    above: usize,
    inside: BTreeMap<String, usize>,
    /// Names that it imports or re-exports, and modules of which it imports everything.
    names: BTreeMap<String, Words>,
    globs: Vec<Words>,
    items: BTreeSet<String>,
    /// Paths in it, each with its line, but those that only re-export.
    paths: Vec<(usize, Words)>,
}

/// For each module those that it uses, and each place where it does.
type Uses = BTreeMap<usize, BTreeMap<usize, BTreeSet<String>>>;

/// Returns the text without comments, and without tests, which may use any module.
fn program(text: &str) -> String {
    let code = text.split("\nmod tests {").next().unwrap_or_default();
    code.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect()
}

/// Returns the paths in a line of code.
fn paths(line: &str) -> Vec<Words> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for part in line.split(|c| !is_word(c) && !":.\"".contains(c)) {
        let pieces: Vec<&str> = part.split('.').collect();
        for (n, path) in pieces.iter().enumerate() {
            // What follows a single point is a method or a field.
            if path.starts_with(is_word) && (n == 0 || n > 1 && pieces[n - 1].is_empty()) {
                let path = path.trim_end_matches(':').split("::");
                found.push(path.map(str::to_owned).collect());
            }
        }
    }
    found
}

/// Returns what a `use` imports: paths, and their names here.
fn imports(above: &[String], tree: &str) -> Vec<(String, Words)> {
    let tree = tree.trim();
    if let Some(group) = tree.strip_prefix('{') {
        let mut depth = 0;
        let parts = group.trim_end_matches('}').split(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            c == ',' && depth == 0
        });
        return parts
            .filter(|part| !part.trim().is_empty())
            .flat_map(|part| imports(above, part))
            .collect();
    }
    let (word, below) = tree.split_once("::").unwrap_or((tree, ""));
    let (word, name) = word.split_once(" as ").unwrap_or((word, word));
    let mut path = above.to_vec();
    if word != "self" || above.is_empty() {
        path.push(word.to_owned());
    }
    if !below.is_empty() {
        return imports(&path, below);
    }
    let name = if name == "self" { path.last().unwrap() } else { name };
    vec![(name.to_owned(), path)]
}

/// Adds the module in `file`, and those inside it, whose files are in `folder`.
fn load(modules: &mut Vec<Module>, file: PathBuf, folder: &Path, above: usize) -> usize {
    let own = modules.len();
    let text = program(&std::fs::read_to_string(&file).unwrap());
    let mut module = Module { file: file.clone(), above, ..Module::default() };
    modules.push(Module::default());
    let mut lines = text.lines().zip(1..);
    let mut attributes = String::new();
    while let Some((line, number)) = lines.next() {
        let code = line.trim_start();
        if code.starts_with("#[") {
            attributes += code;
            continue;
        }
        let attributes = std::mem::take(&mut attributes);
        let (public, code) = match code.strip_prefix("pub") {
            Some(rest) => (true, rest.split_once(' ').unwrap_or_default().1),
            None => (false, code),
        };
        if let Some(name) = code.strip_prefix("mod ").and_then(|code| code.strip_suffix(';')) {
            if ["#[cfg(test)]", "#[cfg(all(test"].iter().any(|it| attributes.contains(it)) {
                continue;
            }
            let given =
                attributes.split_once("#[path = \"").and_then(|(_, it)| it.split('"').next());
            let (at, inner) = match given {
                Some(path) => (file.parent().unwrap().join(path), None),
                None => (folder.join(name).with_extension("rs"), Some(folder.join(name))),
            };
            let at = if at.exists() { at } else { folder.join(name).join("mod.rs") };
            let inner = inner.unwrap_or_else(|| at.parent().unwrap().to_owned());
            let inside = load(modules, at, &inner, own);
            module.inside.insert(name.to_owned(), inside);
        } else if let Some(tree) = code.strip_prefix("use ") {
            let mut tree = tree.to_owned();
            while !tree.contains(';') {
                tree += lines.next().unwrap().0;
            }
            for (name, mut path) in imports(&[], tree.trim_end_matches(';')) {
                if name == "*" {
                    path.pop();
                    module.globs.push(path);
                    continue;
                }
                if !public {
                    module.paths.push((number, path.clone()));
                }
                module.names.insert(name, path);
            }
        } else {
            let found = paths(line);
            for pair in found.windows(2) {
                let kinds = "fn struct enum union trait type const static mut macro_rules";
                if kinds.split(' ').any(|kind| pair[0] == [kind]) {
                    module.items.extend(pair[1].first().cloned());
                }
            }
            module.paths.extend(found.into_iter().map(|path| (number, path)));
        }
    }
    modules[own] = module;
    own
}

/// Returns the module at the end of a path, or the one that defines the item there, and whether it
/// is an item. `most` limits how many re-exports are followed.
fn resolve(modules: &[Module], at: usize, path: &[String], most: u32) -> Option<(usize, bool)> {
    let Some((first, rest)) = path.split_first() else { return Some((at, false)) };
    let module = &modules[at];
    let next = match first.as_str() {
        "crate" => Some(0),
        "self" => Some(at),
        "super" => Some(module.above),
        name => module.inside.get(name).copied(),
    };
    if let Some(next) = next {
        return resolve(modules, next, rest, most);
    }
    let most = most.checked_sub(1)?;
    let imported = match module.names.get(first) {
        Some(path) => resolve(modules, at, path, most),
        None if module.items.contains(first) => return Some((at, true)),
        None => module.globs.iter().find_map(|glob| {
            let (other, _) = resolve(modules, at, glob, most)?;
            (other != at).then(|| resolve(modules, other, &path[..1], most))?
        }),
    };
    match imported? {
        (other, false) => resolve(modules, other, rest, most),
        item => Some(item),
    }
}

fn uses(modules: &[Module]) -> Uses {
    let mut uses = Uses::new();
    for (own, module) in modules.iter().enumerate() {
        for (line, path) in &module.paths {
            let Some((used, true)) = resolve(modules, own, path, 8) else { continue };
            if modules[used].file != module.file {
                let place = format!("{}:{line} {}", module.file.display(), path.join("::"));
                uses.entry(own).or_default().entry(used).or_default().insert(place);
            }
        }
    }
    uses
}

/// Returns those of `within` that `from` uses, also through others of them.
fn reached(uses: &Uses, from: usize, within: &BTreeSet<usize>) -> BTreeSet<usize> {
    let (mut found, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(at) = left.pop() {
        let used = uses.get(&at).into_iter().flat_map(BTreeMap::keys);
        left.extend(used.filter(|used| within.contains(used) && found.insert(**used)));
    }
    found
}

/// Returns sets of modules of which each uses all others, and of which none contains all others.
fn circles(
    uses: &Uses,
    above: &impl Fn(usize) -> usize,
    mut within: BTreeSet<usize>,
) -> Vec<BTreeSet<usize>> {
    let contains = |one, mut other| {
        while other != one && other != above(other) {
            other = above(other);
        }
        other == one
    };
    let mut all = Vec::new();
    while let Some(&at) = within.first() {
        let mut circle = reached(uses, at, &within);
        circle.retain(|&other| reached(uses, other, &within).contains(&at));
        within.remove(&at);
        within.retain(|other| !circle.contains(other));
        let whole = circle.iter().find(|&&one| circle.iter().all(|&other| contains(one, other)));
        match whole.copied() {
            Some(whole) => {
                circle.remove(&whole);
                all.extend(circles(uses, above, circle));
            }
            None if !circle.is_empty() => all.push(circle),
            None => {}
        }
    }
    all
}

#[test]
fn no_module_uses_one_that_uses_it() {
    let (mut pairs, mut found) = (0, String::new());
    for package in packages().unwrap() {
        for target in package["targets"].as_array().unwrap() {
            let kinds = target["kind"].as_array().unwrap();
            if !kinds.iter().any(|kind| ["lib", "staticlib", "bin"].iter().any(|it| kind == it)) {
                continue;
            }
            let root = PathBuf::from(target["src_path"].as_str().unwrap());
            let mut modules = Vec::new();
            load(&mut modules, root.clone(), root.parent().unwrap(), 0);
            let uses = uses(&modules);
            pairs += uses.values().map(BTreeMap::len).sum::<usize>();
            let circles = circles(&uses, &|at| modules[at].above, (0..modules.len()).collect());
            for circle in &circles {
                found += &format!("\n{} of {}:", circle.len(), target["name"]);
                let used = circle.iter().flat_map(|at| &uses[at]);
                let places = used.filter(|(used, _)| circle.contains(used));
                for (used, places) in places {
                    for place in places {
                        found += &format!("\n  {place}: {}", modules[*used].file.display());
                    }
                }
            }
        }
    }
    assert!(found.is_empty(), "modules use each other in circles:{found}");
    assert!(pairs > 2000, "only {pairs} uses of a module by another were found");
}

#[test]
fn a_circle_is_found() {
    let uses = |pairs: &[(usize, usize)]| {
        let mut uses = Uses::new();
        for (one, other) in pairs {
            uses.entry(*one).or_default().entry(*other).or_default();
        }
        // 3 is inside 2; all are inside 0.
        circles(&uses, &|at| if at == 3 { 2 } else { 0 }, (0..5).collect())
    };
    assert_eq!(uses(&[(0, 1), (1, 0), (1, 2), (2, 3), (3, 2), (1, 3)]), []);
    assert_eq!(uses(&[(0, 1), (1, 2), (2, 0), (2, 1)]), [[1, 2].into()]);
    assert_eq!(uses(&[(2, 3), (3, 4), (4, 2)]), [[2, 3, 4].into()]);
    let tree = imports(&[], "super::{self, a::{B, c as D}, e::*}");
    let tree: Vec<_> =
        tree.iter().map(|(name, path)| format!("{name} {}", path.join("."))).collect();
    assert_eq!(tree, ["super super", "B super.a.B", "D super.a.c", "* super.e.*"]);
    let found = paths("X.y(a::B::<T>, z.0..C)").into_iter().map(|path| path.join("."));
    assert_eq!(found.collect::<Vec<_>>(), ["X", "a.B", "T", "z", "C"]);
}

#[test]
fn crates_depend_on_those_before_them_alone() {
    let packages = packages().unwrap();
    let place = |name: &serde_json::Value| CRATES.iter().position(|known| name == known);
    for package in &packages {
        let name = &package["name"];
        let own = place(name).unwrap_or_else(|| panic!("{name} is not in the order of crates"));
        for used in package["dependencies"].as_array().unwrap() {
            if used["kind"].is_null() && place(&used["name"]).is_some_and(|used| used >= own) {
                panic!("{name} depends on {}, which is above it", used["name"]);
            }
        }
    }
    assert_eq!(packages.len(), CRATES.len());
}

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
