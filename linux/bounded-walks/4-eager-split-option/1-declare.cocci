// SPDX-License-Identifier: GPL-2.0-only
//
// file: tools/testing/selftests/kvm/include/kvm_util.h
// leaves 1: extern size_t vm_eager_split_chunk_size;

@@
@@
+/* Eager page splitting chunk size for new VMs (arm64). 0 keeps KVM's default. */
+extern size_t vm_eager_split_chunk_size;
+
 struct kvm_vm *____vm_create(struct vm_shape shape);
