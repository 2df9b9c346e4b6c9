// SPDX-License-Identifier: GPL-2.0-only
//
// The option stands ahead of the switch, as spatch does not lay out a case.
//
// file: tools/testing/selftests/kvm/dirty_log_perf_test.c
// leaves 1: if (opt == 'E') {
// leaves 1: printf(" -E: specify the chunk size of eager page splitting
// leaves 1: pr_info("Eager split chunk size: 0x%zx\n"
// leaves 1: "E:ab

@@
@@
 help(...)
 {
 <...
+	printf(" -E: specify the chunk size of eager page splitting (arm64), e.g. 2M or 1G.\n");
+	printf("     (default: KVM's, which is not to split eagerly)\n");
 backing_src_help("-s");
 ...>
 }

@@
@@
 main(...)
 {
 <...
 getopt(...,
-"ab:c:eghi:m:nop:r:s:v:x:w:"
+"E:ab:c:eghi:m:nop:r:s:v:x:w:"
 )
 ...>
 }

@@
identifier opt;
@@
 main(...)
 {
 <...
+		if (opt == 'E') {
+			vm_eager_split_chunk_size = parse_size(optarg);
+			continue;
+		}
+
 switch (opt) {
 case 'a': ...
 }
 ...>
 }

@@
expression p;
@@
+	if (vm_eager_split_chunk_size) {
+		TEST_REQUIRE(kvm_check_cap(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES) & vm_eager_split_chunk_size);
+		pr_info("Eager split chunk size: 0x%zx\n", vm_eager_split_chunk_size);
+	}
+
 for_each_guest_mode(run_test, p);
