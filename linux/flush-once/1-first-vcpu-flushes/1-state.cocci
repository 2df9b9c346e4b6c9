// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/include/asm/kvm_host.h
// leaves 1: struct mutex flush_lock;
// leaves 1: bool flush_once;
// leaves 1: bool flushed;

@@
@@
 struct kvm_arch {
 	...
 	struct kvm_s2_mmu mmu;
+
+	/*
+	 * Used without FEAT_S2FWB. flush_once: only the first vCPU to enable its
+	 * caches flushes stage 2. flushed: that flush has been done and is still
+	 * valid. Protected by flush_lock.
+	 */
+	struct mutex flush_lock;
+	bool flush_once;
+	bool flushed;
 	...
 };
