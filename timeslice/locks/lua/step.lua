--[[
Moves a swap from one step to the next; or, with the same step twice, says why it hangs and sets a new deadline.
ARGV  1 floor  2 swap  3 epoch  4 from  5 to (prepare | commit | rollback)
      6 budget_ms (0: as it was)  7 reason it hangs, or ''
Reply ok step | stale counter
--]]
-- @include group
local from, to, budget_ms, reason = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]

begin(true)
if not is_swap(ARGV[2], ARGV[3]) or (S.swap_step ~= from and S.swap_step ~= to) then
  return { 'stale', S.counter }
end
settle_clock()
if S.swap_step == from and (from ~= to or budget_ms > 0) then
  set('swap_step', to)
  set('swap_budget_ms', budget_ms)
  set('swap_deadline_ms', now + S.swap_budget_ms)
end
set_phase(reason == '' and 'swapping' or 'blocked', reason)
save()
return { 'ok', S.swap_step }
