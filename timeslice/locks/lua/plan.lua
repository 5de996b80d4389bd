--[[
Stores the plan of a swap before any order goes out. A plan that is there already is never replaced.
ARGV  1 floor  2 swap  3 epoch  4 plan  5 budget_ms
Reply ok plan step | stale counter
Events SwapPlanned
--]]
-- @include group
begin(true, BODY_MAX)
if not is_swap(ARGV[2], ARGV[3]) then
  return { 'stale', S.counter }
end
settle_clock()
if S.swap_step == 'new' then
  set('plan', ARGV[4])
  set('swap_step', 'prepare')
  set('swap_budget_ms', tonumber(ARGV[5]))
  set('swap_deadline_ms', now + S.swap_budget_ms)
  set_phase('swapping', '')
  emit('SwapPlanned', 'swap', ARGV[2], 'plan', ARGV[4])
end
save()
return { 'ok', S.plan, S.swap_step }
