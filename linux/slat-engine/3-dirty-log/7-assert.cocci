// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/slat.c
// leaves 2: kvm_arch_dirty_log_assert(kvm_s2_mmu_to_kvm(pgt->mmu));
// leaves 1: mmu->arch->slat_read_lock =

@@
identifier f = { slat_kvm_pgtable_stage2_wrprotect, slat_kvm_pgtable_stage2_split };
@@
 f(...)
 {
 <...
-	slat_assert_write(pgt);
+	kvm_arch_dirty_log_assert(kvm_s2_mmu_to_kvm(pgt->mmu));
 ...>
 }

@@
@@
 slat_init(...)
 {
 ...
 pgt->slat = vm;
+	mmu->arch->slat_read_lock = READ_ONCE(slat_read_lock) &&
+				    !cpus_have_final_cap(ARM64_HAS_NESTED_VIRT);
 ...
 }

@@
@@
 slat_kvm_pgtable_stage2_wrprotect(...)
 {
 void *vm = ...;
+	int ret;
 ...
 }

@@
@@
 slat_kvm_pgtable_stage2_wrprotect(...)
 {
 ...
-	return slat_kvm_wrprotect(vm, addr, size);
+	/* A fault holds an entry at times, and nobody looks at the result. */
+	while ((ret = slat_kvm_wrprotect(vm, addr, size)) == -EAGAIN)
+		cpu_relax();
+	return ret;
 }
