--[[
A coordinator lets a group go, so that another may take it at once.
ARGV  1 floor  2 coordinator  3 its instance  4 '1' not if a swap was planned
Reply ok | swapping
--]]
-- @include group
local idle_only = ARGV[4] == '1'

begin(true)
if S.owner == ARGV[2] and (redis.call('HGET', state_key, 'owner_instance') or '') == ARGV[3] then
  if idle_only and S.swap_id ~= 0 and S.swap_step ~= 'new' then
    return { 'swapping' }
  end
  settle_clock()
  set('owner', '')
  set('owner_deadline_ms', 0)
  save()
end
return { 'ok' }
