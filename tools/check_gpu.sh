#!/usr/bin/env bash
# All tests that need a GPU, and compute-sanitizer over small calls of every kernel, on a machine with a CUDA device.
# Usage: tools/check_gpu.sh [kernels|engines|sparse|memcheck]...      (all, if none is named; the whole output is in $OUT)
# Needs pytest, pytest-xdist and transformers. Without a network, PIP_FIND_LINKS names the default model's folder.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:-.}" PYTHONDONTWRITEBYTECODE=1
out="${OUT:-$(mktemp -d)}"
pytest=(python3 -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q --tb=short)
status=0

kernels() {
  timeout 240 "${pytest[@]}" -n 8 tests/kernels tests/unit/test_fp8_weights.py >"$out/kernels.txt" 2>&1 || status=1
  tail -n 25 "$out/kernels.txt"
}

# One after the other, since an engine takes the GPU's memory for itself.
engines() {
  timeout 240 "${pytest[@]}" tests/gpu tests/engine/test_equals_transformers.py \
    --ignore=tests/gpu/test_sparse_on_gpu.py >"$out/engines.txt" 2>&1 || status=1
  tail -n 25 "$out/engines.txt"
}

# Small engines, several at a time.
sparse() {
  timeout 560 "${pytest[@]}" -n 4 tests/gpu/test_sparse_on_gpu.py >"$out/sparse.txt" 2>&1 || status=1
  tail -n 25 "$out/sparse.txt"
}

# Every tensor has an allocation of its own then, so that what is read or written behind its end is seen.
memcheck() {
  local chosen=(
    accept_drafts.py::test_no_more_tokens_count_than_an_entry_may_have
    accept_drafts.py::test_tokens_count_up_to_the_first_wrong_draft
    adjust_logits.py::test_every_lane_has_its_own_adjustments
    adjust_logits.py::test_tokens_are_counted_for_lanes_with_penalties_alone
    build_digests.py::test_places_hold_extremes_and_levels_of_keys_and_other_places_stay
    decode_attention.py::test_rows_of_one_entry_each_see_their_own_length
    decode_attention.py::test_the_number_of_splits_changes_nothing
    fetch_accounts.py::test_a_step_runs_again_where_more_is_lacking_and_what_it_fetches_is_counted
    fetch_accounts.py::test_lanes_get_their_refills_up_to_the_most_and_none_for_a_step_that_runs_again
    fetch_blocks.py::test_a_block_that_leaves_the_ring_goes_where_it_is_wanted_or_there_is_room
    fetch_blocks.py::test_blocks_in_8_bits_are_scaled_and_rounded_to_the_dtype_of_pages
    fetch_blocks.py::test_fetched_blocks_lie_in_their_slots_and_evicted_ones_nowhere
    filter_logits.py::test_what_is_not_allowed_does_not_count
    flags.py::test_a_record_leaves_its_number_and_who_waits_for_it_or_an_earlier_one_passes
    fp8.py::test_the_kernel_rounds_as_the_reference_bit_by_bit
    fp8_blocks.py::test_there_and_back_costs_a_sixteenth_or_a_thousandth_of_the_scale
    gather_pages.py::test_every_head_has_its_own_keys
    linear.py::test_in_of_one_piece
    linear.py::test_gates_far_from_zero
    merge_attention.py::test_merged_pieces_equal_one_softmax_over_all_keys
    norm_rope_store.py::test_nothing_is_stored_for_padding_and_its_neighbours_do_not_notice
    norm_rope_store.py::test_the_queries_that_are_wanted_are_kept_as_they_are_returned
    rank_blocks.py::test_as_many_are_wanted_as_there_can_be_in_rows_of_any_length
    rms_norm.py::test_eps_bounds_what_a_row_of_nearly_nothing_becomes
    sampling.py::test_each_row_of_an_entry_draws_by_its_lane_at_a_position_of_its_own
    score_blocks.py::test_logits_of_any_number_of_blocks_are_those_in_higher_precision
    score_keys.py::test_so_they_do_with_heads_as_models_have_them
    select_blocks.py::test_the_plan_of_many_blocks_and_slots_follows_too
    shortlist_blocks.py::test_a_list_has_the_blocks_that_are_worth_most
    silu_mul.py::test_large_gates_neither_overflow_nor_vanish
    sparse_rows.py::test_every_row_is_told_its_keys_in_an_order_and_where_its_own_goes
    step_inputs.py::test_rows_behind_a_lane_s_end_are_stored_nowhere_and_see_no_further_than_it
    store_blocks.py::test_a_page_goes_to_its_host_block_and_padding_nowhere
  )
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 240 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "${pytest[@]}" "${chosen[@]/#/tests/kernels/test_}" >"$out/memcheck.txt" 2>&1 || status=1
  tail -n 8 "$out/memcheck.txt"
}

[ $# -gt 0 ] || set -- kernels engines sparse memcheck
for part in "$@"; do
  case $part in kernels | engines | sparse | memcheck) "$part" ;; *) sed -n 2,4p "$0" && exit 2 ;; esac
done
exit $status
