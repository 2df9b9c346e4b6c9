// SPDX-License-Identifier: GPL-2.0-only
//
// No bug, but VMIDs of 8 bits on every CPU, so that few VMs use them up.
//
// file: arch/arm64/kvm/vmid.c
// leaves 1: kvm_arm_vmid_bits = 8;

@@
@@
 kvm_arm_vmid_alloc_init(...)
 {
 ...
-	kvm_arm_vmid_bits = kvm_get_vmid_bits();
+	kvm_arm_vmid_bits = 8;
 ...
 }
