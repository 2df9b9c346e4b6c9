//! Histories on the other formats.

use super::histories;
use crate::fixture::*;

#[test]
fn no_dirty_page_is_missed_on_arm_lpa2() {
    histories::<ArmLpa2>();
}

#[test]
fn no_dirty_page_is_missed_on_amd() {
    histories::<Amd>();
}

#[test]
fn no_dirty_page_is_missed_on_riscv() {
    histories::<Hart>();
}

#[test]
fn no_dirty_page_is_missed_on_riscv_without_svadu() {
    histories::<HartSvade>();
}

#[test]
fn no_dirty_page_is_missed_on_radix() {
    histories::<Radix>();
}

#[test]
fn no_dirty_page_is_missed_on_radix_where_software_sets_r_and_c() {
    histories::<RadixAsks>();
}
