//! The plan of `docs/slurm`, which measures guests under KVM.

mod common;

use common::slat;

#[test]
fn the_example_has_each_combination_but_what_is_excluded() {
    let plan = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/slurm/plan.toml");
    let assert = slat(&["plan", "--list", plan]).assert().success();
    let cells = String::from_utf8_lossy(&assert.get_output().stdout).lines().count();
    assert_eq!(cells, 2 * (8 - 2), "two repeats, without what is excluded");
}
