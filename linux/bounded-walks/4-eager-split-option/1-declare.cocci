// SPDX-License-Identifier: GPL-2.0-only
//
// file: tools/testing/selftests/kvm/include/kvm_util.h
// leaves 1: extern size_t vm_eager_split_chunk_size;

@@
@@
+/* Chunk size of eager page splitting (arm64) of VMs to come; 0: KVM's default. */
+extern size_t vm_eager_split_chunk_size;
+
 struct kvm_vm *____vm_create(struct vm_shape shape);
