--[[
Moves a swap from one step to the next, or says why it hangs.
ARGV  1 floor  2 swap  3 epoch  4 from  5 to (prepare | commit | rollback)  6 budget_ms  7 reason it hangs, or ''
Reply ok step | stale counter
--]]
-- @include group
local from, to, reason = ARGV[4], ARGV[5], ARGV[7]

begin(true)
if S.swap_id ~= tonumber(ARGV[2]) or S.owner_epoch ~= tonumber(ARGV[3])
  or (S.swap_step ~= from and S.swap_step ~= to) then
  return { 'stale', S.counter }
end
settle_clock()
if S.swap_step == from and from ~= to then
  set('swap_step', to)
  set('swap_budget_ms', tonumber(ARGV[6]))
  set('swap_deadline_ms', now + S.swap_budget_ms)
end
set_phase(reason == '' and 'swapping' or 'blocked', reason)
save()
return { 'ok', S.swap_step }
