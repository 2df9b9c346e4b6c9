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
+	 * Without FEAT_S2FWB: the first vCPU to enable its caches flushes stage 2
+	 * for all of them (flush_once). It has done so, and nothing since has asked
+	 * for another flush (flushed, protected by flush_lock).
+	 */
+	struct mutex flush_lock;
+	bool flush_once;
+	bool flushed;
 	...
 };
