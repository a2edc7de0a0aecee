# SPDX-License-Identifier: Apache-2.0
#
# The plugin as NCCL drives it, over verbs: the newest interface, and the rows of all interfaces with an old one.
export NCCL_IB_HCA=xh1r0,xh2r0 NCCL_SOCKET_IFNAME=lo
rows="./plugin_rows --library ./libnccl-net-loongcomm.so"

# About the networks of TCP, and what its sockets bring.
elsewhere="--not link_goes_down_and_up --not ports_run_out_cleanly --not addresses_of_ipv6 --not many_interfaces
    --not pieces_arrive_in_any_order --not byte_by_byte_through_a_relay --not cut_at_every_offset
    --not broken_connections_lose_nothing --not last_messages_outlive_the_plugin"
# They take long where the guest is emulated.
long="--not former_greeting_is_refused --not bad_interface_names_are_named --not deep_pipeline_tested_at_its_oldest
    --not long_run_of_mixed_messages --not forked_children_do_no_harm --not descriptors_return_to_where_they_were
    --not no_memory_to_lock_is_no_obstacle --not close_with_requests_outstanding --not registration_beside_traffic
    --not one_init_for_each_communicator --not load_and_unload --not many_communicators --not timers_interrupt_everything
    --not route_comes_back_while_connecting --not the_guard_sees_what_blocks --not room_may_exceed_the_message
    --not flags_do_not_overtake_data"
timeout 900 $rows $elsewhere $long || exit 1
timeout 900 $rows --version 8 $long || exit 1
