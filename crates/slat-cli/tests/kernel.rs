//! `slat kernel` on the command line, as far as nothing is built: patches as people have them, and
//! what is wrong with them.

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use std::fs;
use tempfile::TempDir;

const MMU: &str = "one\ntwo\nthree\nfour\nfive\n";

const PATCH: &str = "From: A B <a@b.example>\nDate: Tue, 24 Nov 2026 12:00:00 +0000\n\
                     Subject: [PATCH v3 1/1] KVM: count on\nMessage-ID: <1@b.example>\n\n\
                     Five is not enough.\n\nSigned-off-by: A B <a@b.example>\n---\n\
                     diff --git a/virt/kvm/mmu.c b/virt/kvm/mmu.c\n--- a/virt/kvm/mmu.c\n\
                     +++ b/virt/kvm/mmu.c\n@@ -3,3 +3,4 @@ two\n three\n four\n five\n\
                     +six\n-- \n2.39\n";

/// Makes a small tree, and files with these texts beside it.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().join("linux");
    fs::create_dir_all(tree.join("virt/kvm")).unwrap();
    fs::write(tree.join("Makefile"), "VERSION = 6\nPATCHLEVEL = 12\n").unwrap();
    fs::write(tree.join("virt/kvm/mmu.c"), MMU).unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

/// Returns `slat kernel` with these words, in a folder.
fn kernel(folder: &TempDir, words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.current_dir(folder.path()).arg("kernel").args(words.split(' '));
    command.env("XDG_CACHE_HOME", folder.path().join("cache"));
    command
}

#[test]
fn a_mail_becomes_a_patch_and_the_tree_stays_unchanged() {
    let folder = folder(&[("my.eml", PATCH)]);
    kernel(&folder, "patch --tree linux --patch my.eml -o out --signoff").assert().success();
    let text = fs::read_to_string(folder.path().join("out/0001-KVM-count-on.patch")).unwrap();
    assert!(text.contains("From: A B <a@b.example>\n") && text.contains("\n+six\n"), "{text}");
    assert_eq!(text.matches("Signed-off-by: ").count(), 2, "{text}");
    let tree = fs::read_to_string(folder.path().join("linux/virt/kvm/mmu.c")).unwrap();
    assert_eq!(tree, MMU);
    // The same by standard input, and once more on top of it.
    let stdin =
        kernel(&folder, "patch --tree linux --patch - -o piped").write_stdin(PATCH).assert();
    stdin.success();
    let twice = "patch --tree linux --patch my.eml --patch my.eml";
    kernel(&folder, twice).assert().code(1).stderr(contains("the tree has it already"));
}

#[test]
fn a_patch_that_does_not_fit_names_the_file_and_the_hunk() {
    let other = PATCH.replace(" four\n", " 4\n");
    let folder = folder(&[("my.patch", &other), ("elsewhere.diff", &PATCH.replace("mmu", "x"))]);
    kernel(&folder, "build --tree linux --patch my.patch")
        .assert()
        .code(1)
        .stdout("")
        .stderr(contains("virt/kvm/mmu.c: hunk 1 of 1 (`@@ -3,3 +3,4 @@ two`)"))
        .stderr(contains("my.patch"));
    kernel(&folder, "build --tree linux --patch elsewhere.diff")
        .assert()
        .code(1)
        .stderr(contains("virt/kvm/x.c: the tree has no such file"));
}

#[test]
fn commits_become_patches_and_the_repository_stays_unchanged() {
    let folder = folder(&[("my.patch", PATCH)]);
    let git = |words: &str| {
        let mut git = std::process::Command::new("git");
        git.args(["-C", "linux", "-c", "user.name=T", "-c", "user.email=t@example.org"]);
        let done = git.current_dir(folder.path()).args(words.split(' ')).output().unwrap();
        assert!(done.status.success(), "{words}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    for words in ["init -q", "add .", "commit -qm base", "tag v1", "am -q ../my.patch"] {
        git(words);
    }
    git("checkout -q -b other v1");
    let before = git("log --all --format=%H");
    kernel(&folder, "patch --tree linux --range v1..none -o out").assert().code(2);
    let topic = before.lines().next().unwrap();
    kernel(&folder, &format!("patch --tree linux --range v1..{topic} -o out")).assert().success();
    let text = fs::read_to_string(folder.path().join("out/0001-KVM-count-on.patch")).unwrap();
    assert!(text.contains("From: A B <a@b.example>\n") && text.contains("\n+six\n"), "{text}");
    assert_eq!(git("status --porcelain") + &git("log --all --format=%H"), before);
    let there = "patch --tree linux@v1 --patch my.patch -o at";
    kernel(&folder, there).assert().success();
    let there = format!("patch --tree linux@{topic} --patch my.patch");
    kernel(&folder, &there).assert().code(1).stderr(contains("has it already"));
}

#[test]
fn what_is_no_patch_is_refused_before_anything_is_built() {
    let folder = folder(&[("text", "no diff\n"), ("none/readme", "")]);
    for (words, why) in [
        ("build --tree linux --patch nowhere", "cannot read nowhere"),
        ("build --tree linux --patch text", "it has no patch"),
        ("build --tree linux --patch none", "it has no patch (*.patch"),
        ("build --tree linux --range v1", "write A..B"),
        ("build --tree linux --range v1..v2", "--range v1..v2: "),
        ("build --tree linux@v1", "--tree linux@v1: "),
        ("ab tree:linux -- bench age", "both kernels are the same"),
        ("ab text text2 --patch text -- bench age", "need a tree"),
        ("review tree:linux --patch - -- bench age", "give a file"),
        ("review tree:linux -- bench age", "give the patches"),
    ] {
        kernel(&folder, words).assert().code(2).stdout("").stderr(contains(why));
    }
}

#[test]
fn a_malformed_edit_is_listed_with_its_reason_and_blocks_none() {
    let good = "// file: virt/kvm/mmu.c\n// leaves: x\n";
    let folder = folder(&[("edits/bad.cocci", "@@\n@@\n"), ("edits/good.cocci", good)]);
    kernel(&folder, "list --edits edits")
        .assert()
        .code(1)
        .stdout(contains("good").and(contains("bad").and(contains("file: PATH"))));
    kernel(&folder, "list --edits nowhere")
        .assert()
        .code(2)
        .stderr(contains("cannot read nowhere"));
    kernel(&folder, "build --tree linux --edits edits --edit bad")
        .assert()
        .code(2)
        .stderr(contains("bad.cocci"));
}
