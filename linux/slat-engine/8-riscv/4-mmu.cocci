// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/riscv/kvm/mmu.c
// versions: ..6.15
// leaves 1: slat_wp(kvm, start, end);
// leaves 1: slat_map_device(kvm, &pcache, addr,
// leaves 1: slat_split(kvm, start, end);
// leaves 1: slat_log(kvm, old, new);
// leaves 1: return slat_age(kvm, range, true);
// leaves 1: return slat_age(kvm, range, false);

@@
@@
 gstage_wp_range(...)
 {
 ...
 unsigned long page_size;
+
+	if (slat_is_on(kvm)) {
+		slat_wp(kvm, start, end);
+		return;
+	}
 ...
 }

@@
@@
 kvm_riscv_gstage_ioremap(...)
 {
 <...
-		ret = gstage_set_pte(kvm, 0, &pcache, addr, &pte);
+		if (slat_is_on(kvm))
+			ret = slat_map_device(kvm, &pcache, addr, __pfn_to_phys(pfn), writable);
+		else
+			ret = gstage_set_pte(kvm, 0, &pcache, addr, &pte);
 ...>
 }

@@
@@
 kvm_arch_mmu_enable_log_dirty_pt_masked(...)
 {
 ...
 gstage_wp_range(kvm, start, end);
+	if (slat_is_on(kvm) && kvm_dirty_log_manual_protect_and_init_set(kvm))
+		slat_split(kvm, start, end);
 }

@@
@@
 kvm_arch_commit_memory_region(...)
 {
+	if (slat_is_on(kvm)) {
+		if (change != KVM_MR_DELETE)
+			slat_log(kvm, old, new);
+		return;
+	}
+
 ...
 }

@@
@@
 kvm_age_gfn(...)
 {
 ...
 u64 size = ...;
+
+	if (slat_is_on(kvm))
+		return slat_age(kvm, range, true);
 ...
 }

@@
@@
 kvm_test_age_gfn(...)
 {
 ...
 u64 size = ...;
+
+	if (slat_is_on(kvm))
+		return slat_age(kvm, range, false);
 ...
 }
